// The last runs of a schedule as a strip of small squares: the newest is on the right.
import { part, withQuery } from "../api.js";
import { duration, local } from "../format.js";
import { html, useEffect, useRef, useState } from "../lib.js";
import { useRead } from "../read.js";
import { Link, link } from "../router.js";

const WORDS = {
  waiting: "waiting",
  running: "running",
  done: "done",
  dead: "dead",
  cancelled: "cancelled",
};
// How often a strip is read again while one of its runs has not ended.
const AGAIN_MS = 5000;

export const runsPath = (name, count) => withQuery(`/v1/schedules/${part(name)}/runs`, { count });

export const stateWords = (run) => (run.state === null ? "skipped, or deleted since" : WORDS[run.state] ?? run.state);

const unended = (run) => run.state === "waiting" || run.state === "running";

/** What the squares say, for those who don't see them. */
export function summary(runs) {
  if (runs.length === 0) return "No runs yet";
  const counts = {};
  for (const run of runs) counts[stateWords(run)] = (counts[stateWords(run)] ?? 0) + 1;
  const words = Object.entries(counts).map(([state, n]) => `${n} ${state}`);
  return `Last runs: ${words.join(", ")}`;
}

const title = (run) => {
  const late = run.lateness_ms === null || run.lateness_ms === undefined ? "" : `, started ${duration(run.lateness_ms)} late`;
  return `${local(run.tick)}: ${stateWords(run)}${late}${run.error ? `\n${run.error}` : ""}`;
};

/** `links`: each square leads to its job. */
export function Strip({ runs, links = false }) {
  if (runs.length === 0) return html`<span class="quiet">none yet</span>`;
  const inOrder = runs.toReversed();
  const square = (run) => `square ${run.state ?? "none"}`;
  if (!links) {
    return html`<span class="strip" role="img" aria-label=${summary(runs)}>${inOrder.map(
      (run) => html`<i key=${run.tick} class=${square(run)} title=${title(run)}></i>`,
    )}</span>`;
  }
  return html`<span class="strip large">${inOrder.map((run) =>
    run.state === null
      ? html`<i key=${run.tick} class=${square(run)} title=${title(run)}></i>`
      : html`<${Link} key=${run.tick} class=${square(run)} to=${link("/job", { id: run.id })} title=${title(run)} aria-label=${title(run)} />`,
  )}</span>`;
}

/** The strip of a schedule, read when it comes into sight and after each new run. */
export function LastRuns({ name, version, count = 12 }) {
  const element = useRef(null);
  const [seen, setSeen] = useState(false);
  const [open, setOpen] = useState(false);
  useEffect(() => {
    const observer = new IntersectionObserver((entries) => setSeen(entries.some((entry) => entry.isIntersecting)), { rootMargin: "100px" });
    observer.observe(element.current);
    return () => observer.disconnect();
  }, []);
  const [path, setPath] = useState(null);
  useEffect(() => seen && setPath(runsPath(name, count)), [seen, name, count]);
  const { document, problem } = useRead(path, { version, every: seen && open ? AGAIN_MS : 0 });
  useEffect(() => setOpen(document?.runs.some(unended) ?? false), [document]);
  return html`<span ref=${element} class="strip-place">
    ${document ? html`<${Strip} runs=${document.runs} />` : problem ? html`<span class="quiet" title=${problem.message}>not known</span>` : null}
  </span>`;
}
