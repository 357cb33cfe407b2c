// Something done to many jobs: how many first, then whether, then batch by batch until it is done or stopped.
import { get, post, withQuery } from "../api.js";
import { count, plural } from "../format.js";
import { Source, html, useEffect, useSource } from "../lib.js";
import { live } from "../live.js";
import { attempt, confirm, openDialog, say } from "./dialog.js";

const BATCH = 1000;
// How many ids one request may bring.
const PAGE = 500;

export const ACTIONS = {
  cancel: { verb: "Cancel", done: "cancelled", what: "They will not run. Those that run now are asked to stop.", danger: true },
  rerun: { verb: "Rerun", done: "rerun", what: "They are due at once, with all their retries.", danger: false },
  delete: { verb: "Delete", done: "deleted", what: "They are gone for good, with their arguments, results and errors.", danger: true },
};

const OUTCOMES = {
  too_late: "had already ended",
  not_ended: "had not ended",
  not_dead: "were no longer dead",
  changed: "were changed in the meantime",
  unknown: "no longer existed",
};

/** The server's time: what is before it has ended before we began. */
export async function serverNow() {
  const overview = await get("/v1/overview").catch(() => null);
  return overview?.now ? Date.parse(overview.now) : Date.now();
}

// --- What is done, as batches

/** By ids, some at a time. */
export async function* byIds(path, ids) {
  for (let at = 0; at < ids.length; at += BATCH) yield await post(path, { ids: ids.slice(at, at + BATCH) });
}

/** By filter, while more match. A batch that changes nothing would be found again and again. */
export async function* byFilter(path, filter) {
  for (;;) {
    const answer = await post(path, { filter, limit: BATCH });
    yield answer;
    if (!answer.more || answer.changed === 0) return;
  }
}

/** Running jobs stay running until they stop: each is asked once, by its id. */
export async function* byPages(path, query) {
  let cursor = null;
  do {
    const page = await get(withQuery("/v1/jobs", { ...query, brief: true, cursor, limit: PAGE }));
    if (page.jobs.length) yield* byIds(path, page.jobs.map((job) => job.id));
    cursor = page.cursor;
  } while (cursor !== null);
}

// --- The run

class Run extends Source {
  // "running", "done", "stopped", "failed"
  state = "running";
  changed = 0;
  outcomes = new Map();
  problem = null;

  async carryOut(batches) {
    try {
      for await (const answer of batches) {
        this.#take(answer);
        if (this.state === "stopped") break;
      }
      if (this.state === "running") this.state = "done";
    } catch (problem) {
      this.problem = problem;
      this.state = "failed";
    }
    this.tell();
    live.refresh();
  }

  stop() {
    if (this.state === "running") this.state = "stopped";
    this.tell();
  }

  #take({ changed, results }) {
    this.changed += changed;
    for (const { outcome } of results) {
      if (outcome in OUTCOMES) this.outcomes.set(outcome, (this.outcomes.get(outcome) ?? 0) + 1);
    }
    this.tell();
  }
}

/** "120 jobs deleted; 3 no longer existed." */
export function summary(run, action) {
  const rest = [...run.outcomes].map(([outcome, n]) => `${count(n)} ${OUTCOMES[outcome]}`);
  const head = `${plural(run.changed, "job")} ${ACTIONS[action].done}`;
  return `${[head, ...rest].join("; ")}.`;
}

function Progress({ run, action, total, exact, close }) {
  useSource(run);
  const running = run.state === "running";
  // Closed while it runs: it must not go on where nobody can stop it.
  useEffect(() => () => {
    if (run.state !== "running") return;
    run.stop();
    say(`Stopped. ${summary(run, action)}`);
  }, []);
  const title = { running: `${ACTIONS[action].verb}: under way`, done: "Finished", stopped: "Stopped", failed: "It failed on the way" }[run.state];
  return html`<div class="body bulk">
    <h2 id="dialog-title">${title}</h2>
    ${running && html`<progress aria-label="Progress" value=${exact ? Math.min(run.changed, total) : undefined} max=${exact ? Math.max(total, 1) : undefined}></progress>`}
    <p role="status" class="num">${running ? `${count(run.changed)} of ${exact ? "" : "at least "}${plural(total, "job")} ${ACTIONS[action].done} so far.` : summary(run, action)}</p>
    ${run.problem && html`<p class="very-late" role="alert">${run.problem.message}</p>`}
    <div class="actions">
      ${running
        ? html`<button class="button danger" onClick=${() => run.stop()}>Stop</button>`
        : html`<button class="button main" autofocus onClick=${close}>Close</button>`}
    </div>
  </div>`;
}

/**
 * Ask, then do it and show how far it is. `total` and `exact`: how many jobs it is about. `about`: in words, which.
 * `batches()`: what is done. `typed`: a word to type first. Returns whether it was begun.
 */
export async function bulk({ action, total, exact = true, about, batches, typed = null, more = null }) {
  const { verb, what, danger } = ACTIONS[action];
  const jobs = `${exact ? "" : "at least "}${plural(total, "job")}`;
  const text = html`<p><strong>${exact ? "" : "At least "}${plural(total, "job")}</strong>${about && html` ${about}`}. ${what}</p>${more && html`<p class="quiet">${more}</p>`}`;
  if (!(await confirm({ title: `${verb} ${jobs}?`, words: text, action: `${verb} ${jobs}`, danger, typed }))) return false;
  const run = new Run();
  openDialog((close) => html`<${Progress} ...${{ run, action, total, exact, close }} />`);
  void run.carryOut(batches());
  return true;
}

/** How many jobs match: `{ count, exact }`, or undefined if it can't be told (which is said). */
export const countOf = (query) => attempt(() => get(withQuery("/v1/jobs/count", query)));
