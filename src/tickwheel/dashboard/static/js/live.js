// What the server tells by itself: one stream for the tab, with all that is shown.
import { Problem, address, decode, get, probe } from "./api.js";
import { Source, store, stored, useEffect, useSource } from "./lib.js";

export const INTERVALS = [1, 2, 5, 15, 30, 60];
// How long to wait before the next try, after each failure.
const AGAIN_MS = [500, 1000, 2000, 5000, 10_000];
// And after the server has refused: it will hardly think otherwise, unless there were too many.
const REFUSED_MS = 30_000;

/** Apply what has changed to a document. */
export function patched(old, patch) {
  if ("set" in patch) return patch.set;
  if ("order" in patch) {
    const known = new Map((old ?? []).map((item) => [item[patch.by], item]));
    return patch.order.map((key) =>
      key in patch.items ? patched(known.get(key), patch.items[key]) : known.get(key),
    );
  }
  const copy = { ...old };
  for (const [name, inner] of Object.entries(patch.keys ?? {})) copy[name] = patched(copy[name], inner);
  for (const name of patch.drop ?? []) delete copy[name];
  return copy;
}

class Live extends Source {
  // What is watched, by path: how many parts of the page, the document, and what is wrong with it.
  #watched = new Map();
  #stream = null;
  #pending = 0;
  #failures = 0;
  heardAt = null;
  // "live", "connecting", "refused", "hidden", "off"
  status = "connecting";

  constructor() {
    super();
    const every = Number(stored("every", "2"));
    this.every = every === 0 || INTERVALS.includes(every) ? every : 2;
    document.addEventListener("visibilitychange", () => this.#restart());
    addEventListener("online", () => this.#restart());
    // A stream that is left open would hold up the next page.
    addEventListener("pagehide", () => this.#close());
  }

  watch(path) {
    const entry = this.#watched.get(path);
    if (entry) entry.users += 1;
    else {
      this.#watched.set(path, { users: 1, document: undefined, problem: null });
      this.#restart();
    }
    return () => {
      const left = this.#watched.get(path);
      left.users -= 1;
      if (left.users === 0) {
        this.#watched.delete(path);
        this.#restart();
      }
    };
  }

  of(path) {
    return this.#watched.get(path) ?? { document: undefined, problem: null };
  }

  setInterval(every) {
    this.every = every;
    store("every", String(every));
    this.#restart();
  }

  /** Read everything again now. */
  async refresh() {
    if (this.every !== 0) return this.#restart();
    await this.#readOnce();
  }

  #restart() {
    // The parts of a page come and go together: one new stream for all of them.
    clearTimeout(this.#pending);
    this.#pending = setTimeout(() => this.#open(), 10);
  }

  #close() {
    this.#stream?.close();
    this.#stream = null;
  }

  #say(status) {
    this.status = status;
    this.tell();
  }

  #open() {
    clearTimeout(this.#pending);
    this.#close();
    if (this.#watched.size === 0) return;
    if (document.hidden) return this.#say("hidden");
    if (this.every === 0) {
      this.#say("off");
      return void this.#readOnce();
    }
    this.#say(this.heardAt === null ? "connecting" : this.status === "live" ? "live" : "connecting");
    const query = new URLSearchParams({ every: String(this.every) });
    for (const path of this.#watched.keys()) query.append("path", path);
    const path = `/v1/watch?${query}`;
    const stream = (this.#stream = new EventSource(address(path)));
    const heard = (take) => (event) => {
      if (stream !== this.#stream) return;
      this.#failures = 0;
      this.heardAt = Date.now();
      this.status = "live";
      if (event.data) take(decode(event.data));
      this.tell();
    };
    const update = (path, change) => {
      const entry = this.#watched.get(path);
      if (entry) Object.assign(entry, change(entry));
    };
    stream.addEventListener("document", heard(({ path, document }) => update(path, () => ({ document, problem: null }))));
    stream.addEventListener(
      "change",
      heard(({ path, patch }) => update(path, (entry) => ({ document: patched(entry.document, patch), problem: null }))),
    );
    stream.addEventListener("problem", heard(({ path, problem }) => update(path, () => ({ problem: new Problem(problem.status, problem) }))));
    stream.addEventListener("beat", heard(() => {}));
    stream.addEventListener("end", () => this.#again(path));
    stream.onerror = () => stream === this.#stream && this.#again(path);
  }

  #again(path) {
    this.#close();
    this.#say("connecting");
    const wait = AGAIN_MS[Math.min(this.#failures, AGAIN_MS.length - 1)];
    this.#failures += 1;
    clearTimeout(this.#pending);
    this.#pending = setTimeout(() => this.#check(path), wait);
  }

  /** An event stream doesn't say why it was refused; the same as a request does. */
  async #check(path) {
    const mine = this.#pending;
    try {
      await probe(path);
    } catch (problem) {
      // Something else is watched by now.
      if (mine !== this.#pending) return;
      if (problem.status === 0 || problem.status >= 500) return this.#again(path);
      return this.#refused(problem);
    }
    if (mine === this.#pending) this.#open();
  }

  /** All that is watched has this problem. */
  #refused(problem) {
    for (const entry of this.#watched.values()) entry.problem = problem;
    this.#say("refused");
    this.#pending = setTimeout(() => this.#open(), REFUSED_MS);
  }

  async #readOnce() {
    await Promise.all(
      [...this.#watched].map(async ([path, entry]) => {
        try {
          Object.assign(entry, { document: await get(path), problem: null });
          this.heardAt = Date.now();
        } catch (problem) {
          entry.problem = problem;
        }
      }),
    );
    this.tell();
  }
}

export const live = new Live();

/** The document at this path of the API, kept up to date; undefined until it is there. */
export function useWatch(path) {
  useSource(live);
  useEffect(() => (path ? live.watch(path) : undefined), [path]);
  const { document, problem } = path ? live.of(path) : {};
  return [document, problem ?? null];
}
