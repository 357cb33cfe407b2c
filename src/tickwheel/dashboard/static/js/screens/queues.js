// Queues: how many jobs each holds, and whether anybody takes care of them.
import { part, post } from "../api.js";
import { compact, count, plural } from "../format.js";
import { html } from "../lib.js";
import { live, useWatch } from "../live.js";
import { attempt, confirm } from "../parts/dialog.js";
import { Heading, Panel } from "../parts/heading.js";
import { Badge, Empty, Loading, Text, Trouble } from "../parts/marks.js";
import { Table } from "../parts/table.js";
import { Ago } from "../parts/time.js";
import { Link, link, route } from "../router.js";
import { session } from "../session.js";

const WORKERS_SHOWN = 3;

export function Queues() {
  const [document, problem] = useWatch("/v1/queues");
  const [fleet] = useWatch("/v1/workers");
  const queues = document?.queues;
  return html`<${Heading} title="Queues" />
    ${problem && !queues ? html`<${Trouble} problem=${problem} retry=${() => live.refresh()} />` : !queues ? html`<${Loading} />` : html`<${List} queues=${queues} workers=${fleet?.workers} />`}`;
}

function List({ queues, workers }) {
  const rows = queues.map((queue) => ({ ...queue, workers: workers?.filter((each) => each.queues.includes(queue.name)) }));
  return html`<${Panel} inner=${false}>
    <${Table} caption="Queues" columns=${columns()} rows=${rows} keyOf=${(each) => each.name} open=${(each) => route.go(link("/jobs", { queue: each.name }))}
      empty=${html`<${Empty} title="There are no queues yet.">A queue appears with its first job.<//>`} />
  <//>`;
}

const counted = (label, field, view) => ({
  label,
  class: "right",
  cell: (queue) => {
    if (queue[field] === null) return html`<span class="quiet" title="Your key does not see this.">–</span>`;
    return queue[field]
      ? html`<${Link} class=${field === "dead" ? "very-late" : ""} title=${count(queue[field])} to=${link(view ? "/jobs" : "/dead", { view, queue: queue.name })}>${compact(queue[field])}<//>`
      : html`<span class="quiet">0</span>`;
  },
});

const columns = () => [
  { label: "Queue", class: "wide", cell: (queue) => html`<${Name} queue=${queue} />` },
  { label: "Served by", class: "wide", cell: (queue) => html`<${ServedBy} queue=${queue} />` },
  counted("Waiting", "waiting", "waiting"),
  counted("Running", "running", "running"),
  counted("Done", "done", "done"),
  counted("Dead", "dead", null),
  counted("Cancelled", "cancelled", "cancelled"),
  ...(session.may("operate") ? [{ label: "", class: "tight", cell: (queue) => html`<${Action} queue=${queue} />` }] : []),
];

function Name({ queue }) {
  return html`<div><${Link} to=${link("/jobs", { queue: queue.name })}><${Text} value=${queue.name} /><//> ${queue.paused && html`<${Badge} kind="paused" />`}
    ${queue.unserved_tasks.map(
      (each) => html`<div key=${each.task} class="very-late">No worker knows the task <${Text} value=${each.task} mono=${true} />: its jobs have waited since <${Ago} at=${each.since} /></div>`,
    )}</div>`;
}

function ServedBy({ queue }) {
  if (queue.workers === undefined) return html`<span class="quiet">…</span>`;
  if (queue.workers.length === 0) {
    const urgent = queue.waiting > 0 && !queue.paused;
    return urgent ? html`<${Badge} kind="bad" title="Its jobs wait until a worker with this queue starts.">no worker serves this queue<//>` : html`<span class="quiet">no worker</span>`;
  }
  const shown = queue.workers.slice(0, WORKERS_SHOWN);
  const more = queue.workers.length - shown.length;
  return html`<div>${shown.map((worker, n) => html`${n > 0 && ", "}<${Link} key=${worker.name} to=${link("/workers", { text: worker.name })}><${Text} value=${worker.name} /><//>`)}
    ${more > 0 && html` <${Link} to=${link("/workers", { text: queue.name })}>and ${plural(more, "more", "more")}<//>`}</div>`;
}

// --- Pausing

function Action({ queue }) {
  // A key for some tasks may pause no queue.
  if (queue.waiting === null) return null;
  return queue.paused
    ? html`<button class="button small" aria-label=${`Resume ${queue.name}`} onClick=${() => resume(queue)}>Resume</button>`
    : html`<button class="button small" aria-label=${`Pause ${queue.name}`} onClick=${() => pause(queue)}>Pause</button>`;
}

async function pause(queue) {
  const yes = await confirm({
    title: html`Pause the queue <${Text} value=${queue.name} />?`,
    words: html`Workers take no more of its ${plural(queue.waiting, "waiting job")}. What runs now goes on, and what a worker already holds still starts, within about a second. Jobs can be added as before.`,
    action: "Pause the queue",
  });
  if (yes) await set(queue, "pause", "is paused.");
}

async function resume(queue) {
  const yes = await confirm({
    title: html`Resume the queue <${Text} value=${queue.name} />?`,
    words: html`Workers take its jobs again, at once those that are due: ${plural(queue.waiting, "job")} waiting.`,
    action: "Resume the queue",
  });
  if (yes) await set(queue, "resume", "runs again.");
}

async function set(queue, step, words) {
  const answer = await attempt(() => post(`/v1/queues/${part(queue.name)}/${step}`), html`<${Text} value=${queue.name} /> ${words}`);
  if (answer !== undefined) live.refresh();
}
