// The attempts at a job: for each, how long it waited, was held, was late, and ran.
import { duration, plural } from "../format.js";
import { html } from "../lib.js";
import { Badge, Text } from "./marks.js";
import { Time, useNow } from "./time.js";

const KINDS = { waited: "waited", held: "held by its worker", late: "late", ran: "ran", ahead: "still to wait" };
const WORDS = {
  done: "done", retry: "failed, to be retried", dead: "dead", lost: "its worker was lost", snooze: "asked to run later",
  release: "released by its worker", park: "put back: its worker does not know the task", expire: "expired", other: "ended",
};

const ms = (text) => (text ? Date.parse(text) : null);

/** The parts of an attempt that began to wait at `from`, as `{ kind, ms }`. Pure. */
export function parts({ from, due, started, ended, heldMs = 0 }) {
  const start = started ?? ended;
  const found = [];
  const add = (kind, begin, end) => end > begin && found.push({ kind, ms: end - begin });
  const claimed = Math.max(from, start - heldMs);
  // A worker may claim it before it is due: up to then it holds it, from then on it is late.
  const turn = Math.min(Math.max(due, from), start);
  const held = Math.min(claimed, turn);
  add("waited", from, held);
  add("held", held, turn);
  add("late", turn, start);
  if (started !== null) found.push({ kind: "ran", ms: Math.max(ended - started, 0) });
  return found;
}

/** Each attempt of a job, and what comes next, with its parts. */
export function attempts(job, now) {
  let from = ms(job.created);
  // Older runs are dropped from the history: how long the first one left has waited is not known.
  const cut = job.history.length > 0 && job.history[0].attempt > 1 && job.history.length >= 20;
  const rows = job.history.map((run, n) => {
    const ended = ms(run.ended);
    const begin = n === 0 && cut ? Math.min(ms(run.due), ms(run.started) ?? ended) : Math.min(from, ms(run.started) ?? ended);
    const row = { run, parts: parts({ from: begin, due: ms(run.due), started: ms(run.started), ended, heldMs: run.held_ms ?? 0 }) };
    from = ended;
    return row;
  });
  const next = job.ended ? null : coming(job, Math.min(from, now), now);
  return { rows, next, cut };
}

function coming(job, from, now) {
  const due = ms(job.due);
  const found = [];
  const add = (kind, begin, end) => end > begin && found.push({ kind, ms: end - begin });
  add("waited", from, Math.max(Math.min(due, now), from));
  if (due > now) add("ahead", now, due);
  else add(job.state === "running" ? "ran" : "late", Math.max(due, from), now);
  return found;
}

/** Widths from 0 to 1: square roots, so that 3 ms still shows beside 3 days. */
export function widths(rows) {
  const sizes = rows.map((row) => row.map((part) => Math.sqrt(part.ms)));
  const most = Math.max(...sizes.map((row) => row.reduce((sum, size) => sum + size, 0)), 1);
  return sizes.map((row) => row.map((size) => size / most));
}

export function Timeline({ job }) {
  const now = useNow();
  const { rows, next, cut } = attempts(job, now);
  const all = [...rows.map((row) => row.parts), ...(next ? [next] : [])];
  const scale = widths(all);
  return html`<div class="timeline">
    <p class="quiet">Created <${Time} at=${job.created} millis />. ${cut && `${plural(job.history[0].attempt - 1, "earlier attempt")} no longer kept.`}</p>
    <ol>
      ${rows.map(({ run, parts: pieces }, n) => html`<${Attempt} key=${run.attempt} run=${run} pieces=${pieces} scale=${scale[n]} />`)}
      ${next && html`<${Next} key="next" job=${job} pieces=${next} scale=${scale.at(-1)} />`}
    </ol>
    <p class="legend" aria-hidden="true">
      ${Object.entries(KINDS).map(([kind, words]) => html`<span><i class=${`part-${kind}`}></i>${words}</span>`)}
      <span>Widths grow with the square root of the time.</span>
    </p>
  </div>`;
}

function Attempt({ run, pieces, scale }) {
  return html`<li>
    <div class="line"><strong>Attempt ${run.attempt}</strong> <${Badge} kind=${run.outcome}>${run.outcome}<//>
      <span class="quiet">${WORDS[run.outcome] !== run.outcome && `${WORDS[run.outcome] ?? ""} · `}on <${Text} value=${run.worker} /> · ${run.started ? "started" : "not started, ended"} <${Time} at=${run.started ?? run.ended} millis /></span></div>
    <${Bar} pieces=${pieces} scale=${scale} />
    <div class="num">${inWords(pieces)}</div>
    ${run.error && html`<div class="very-late"><${Text} value=${run.error} /></div>`}
  </li>`;
}

function Next({ job, pieces, scale }) {
  const running = job.state === "running";
  return html`<li>
    <div class="line"><strong>${running ? `Attempt ${job.attempts}` : `Attempt ${job.attempts + 1}`}</strong> <${Badge} kind=${job.state} />
      <span class="quiet">${running && job.worker ? html`on <${Text} value=${job.worker} /> · ` : ""}due <${Time} at=${job.due} millis /></span></div>
    <${Bar} pieces=${pieces} scale=${scale} />
    <div class="num">${running ? inWords(pieces).replace(/ran (?=[^,]*$)/, "with its worker for ") : inWords(pieces)}</div>
  </li>`;
}

function Bar({ pieces, scale }) {
  return html`<div class="bar" aria-hidden="true">
    ${pieces.map((part, n) => html`<span class=${`part-${part.kind}`} style=${{ width: `${(scale[n] * 100).toFixed(2)}%` }} title=${`${KINDS[part.kind]} ${duration(part.ms)}`}></span>`)}
  </div>`;
}

const SAID = { waited: (text) => `waited ${text}`, held: (text) => `held ${text}`, late: (text) => `${text} late`, ran: (text) => `ran ${text}`, ahead: (text) => `${text} to go` };

const inWords = (pieces) => pieces.map((part) => SAID[part.kind](duration(part.ms))).join(", ") || "at once";
