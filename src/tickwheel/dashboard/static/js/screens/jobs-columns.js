// The columns of a list of jobs.
import { duration, percent } from "../format.js";
import { html } from "../lib.js";
import { Badge, Lateness, Text } from "../parts/marks.js";
import { Ago, Time } from "../parts/time.js";
import { Link, link } from "../router.js";

/** What a waiting job waits for: one of the views. */
export function viewOf(job, now = Date.now()) {
  if (job.state !== "waiting") return job.state;
  if (job.failures > 0) return "retrying";
  return Date.parse(job.due) > now ? "scheduled" : "ready";
}

function How({ job }) {
  const last = job.history.at(-1);
  if (job.state === "done" && last?.started) {
    return html`<${Lateness} ms=${last.lateness_ms} /> late, took <span class="num">${duration(Date.parse(last.ended) - Date.parse(last.started))}</span>`;
  }
  if (job.state === "running") {
    if (job.cancel_requested) return html`<span class="late">asked to stop</span>`;
    return job.progress ? html`<span class="num">${percent(job.progress.part)}</span> <${Text} value=${job.progress.words} cut />` : html`<span class="quiet">–</span>`;
  }
  if (job.error) return html`<${Text} value=${job.error} cut />`;
  return html`<span class="quiet">–</span>`;
}

function Due({ job }) {
  const at = job.ended ?? job.due;
  return html`<${Time} at=${at} /> <span class="quiet">${job.ended ? "ended " : ""}<${Ago} at=${at} /></span>`;
}

export const COLUMNS = [
  { label: "Id", class: "wide-id", cell: (job) => html`<${Link} to=${link("/job", { id: job.id })}><${Text} value=${job.id} mono cut /><//>` },
  { label: "Task", cell: (job) => html`<${Text} value=${job.task} cut />` },
  {
    label: "Queue",
    cell: (job) => html`<span class="cell-row"><${Text} value=${job.queue} cut />${job.priority !== "normal" && html` <${Badge} kind="priority">${job.priority}<//>`}</span>`,
  },
  { label: "State", class: "tight", cell: (job) => html`<${Badge} kind=${viewOf(job)} />` },
  { label: "Due or ended", class: "due", cell: (job) => html`<${Due} job=${job} />` },
  { label: "Attempts", class: "right tight", cell: (job) => job.attempts },
  { label: "Late, took, or error", cell: (job) => html`<${How} job=${job} />` },
  { label: "Worker", cell: (job) => (job.worker ? html`<${Text} value=${job.worker} cut />` : html`<span class="quiet">–</span>`) },
];
