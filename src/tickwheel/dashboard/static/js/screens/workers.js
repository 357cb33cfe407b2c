// Workers: who is there, how busy, and with what.
import { count, duration, percent, plural } from "../format.js";
import { onKeys } from "../keyboard.js";
import { html, useEffect, useRef } from "../lib.js";
import { live, useWatch } from "../live.js";
import { Heading, Panel } from "../parts/heading.js";
import { Badge, Empty, Loading, Note, Text, Trouble } from "../parts/marks.js";
import { Table } from "../parts/table.js";
import { Ago, useNow } from "../parts/time.js";
import { Link, link, route, useRoute } from "../router.js";

const RUNNING_MOST = 200;
// Later than this and something is wrong: they tell of themselves every few seconds.
const SILENT_MS = 20_000;
// As the doctor sees it.
const OFFSET_MS = 1000;

export function Workers() {
  const { text = "" } = useRoute().query;
  const [document, problem] = useWatch("/v1/workers");
  const [running] = useWatch(`/v1/jobs?view=running&brief=true&limit=${RUNNING_MOST}`);
  const workers = document?.workers;
  return html`
    <${Heading} title="Workers">
      <span class="spring"></span>
      ${workers?.length > 0 && html`<${Filter} text=${text} />`}
    <//>
    ${problem && !workers ? html`<${Trouble} problem=${problem} retry=${() => live.refresh()} />` : !workers ? html`<${Loading} />` : html`<${List} workers=${workers} running=${running} text=${text} />`}`;
}

function Filter({ text }) {
  const search = useRef(null);
  useEffect(() => onKeys({ "/": () => search.current?.focus() }), []);
  return html`<input ref=${search} type="search" class="input filter" placeholder="Filter by name, host, queue or task" aria-label="Filter workers" value=${text}
    onInput=${(event) => route.set({ text: event.target.value }, { replace: true })} />`;
}

function List({ workers, running, text }) {
  if (workers.length === 0) return html`<${Nobody} />`;
  const wanted = text.toLowerCase();
  const found = workers.filter((each) => [each.name, each.host, each.app ?? "", ...each.queues, ...(each.tasks ?? [])].some((part) => part.toLowerCase().includes(wanted)));
  const jobs = running?.jobs ?? [];
  const cut = running?.cursor;
  return html`
    <${Summary} workers=${workers} />
    ${cut && html`<${Note}>More than ${RUNNING_MOST} jobs run: not all are shown here. <${Link} to="/jobs?view=running">All running jobs<//><//>`}
    ${found.length === 0 && html`<${Empty} title="No worker matches.">Filter by something else.<//>`}
    ${found.map((worker) => html`<${Worker} key=${worker.name} worker=${worker} jobs=${jobs.filter((job) => job.worker === worker.name)} known=${running !== undefined} />`)}`;
}

function Nobody() {
  return html`<${Panel}><${Empty} title="No worker is running, so no job runs.">
    Start one: <code>tickwheel worker MODULE:APP</code>. It appears here within seconds.
  <//><//>`;
}

function Summary({ workers }) {
  const sum = (field) => workers.reduce((total, each) => total + each[field], 0);
  const versions = [...new Set(workers.map((each) => each.version))].toSorted();
  return html`<p class="quiet">${plural(workers.length, "worker")} · ${count(sum("running"))} of ${count(sum("concurrency"))} slots busy · ${count(sum("held"))} held
    ${versions.length > 1 && html` · <span class="late">different releases: ${versions.join(", ")}</span>`}</p>`;
}

// --- One worker

function Worker({ worker, jobs, known }) {
  const now = useNow();
  const silent = now - Date.parse(worker.seen) > SILENT_MS;
  const title = html`<${Text} value=${worker.name} />`;
  const marks = html`${silent && html`<${Badge} kind="bad">not heard of for ${duration(now - Date.parse(worker.seen))}<//>`}
    ${Math.abs(worker.offset_ms) > OFFSET_MS && html`<${Badge} kind="warn">its clock is off by ${duration(Math.abs(worker.offset_ms))}<//>`}`;
  return html`<${Panel} title=${title} tools=${marks} class="worker" inner=${false}>
    <div class="inner worker-facts">
      <${Load} worker=${worker} />
      <${Facts} worker=${worker} />
    </div>
    <${Running} worker=${worker} jobs=${jobs} known=${known} />
  <//>`;
}

/** How many of its slots are busy; beside them, what it holds for later. */
function Load({ worker }) {
  const { concurrency, running, held } = worker;
  const waiting = Math.max(held - running, 0);
  const width = (n) => ({ width: `${Math.min(n / Math.max(concurrency, 1), 1) * 100}%` });
  return html`<div class="load">
    <div class="load-bar" role="meter" aria-label="Slots busy" aria-valuemin="0" aria-valuemax=${concurrency} aria-valuenow=${running} aria-valuetext=${`${running} of ${concurrency}`}>
      <i class="busy" style=${width(running)}></i><i class="held" style=${width(Math.min(waiting, concurrency - running))}></i>
    </div>
    <span class="num">${count(running)} of ${count(concurrency)} slots busy${waiting > 0 && html` <span class="quiet">· ${count(waiting)} held, not started</span>`}</span>
  </div>`;
}

function Facts({ worker }) {
  const { counts } = worker;
  const facts = [
    ["App", worker.app && html`<${Text} value=${worker.app} />`],
    ["Host", html`<${Text} value=${worker.host} /> <span class="quiet">pid ${worker.pid}</span>`],
    ["Release", worker.version],
    ["Up since", html`<${Ago} at=${worker.started} />`],
    ["Last heard", html`<${Ago} at=${worker.seen} />`],
    ["Clock", clockWords(worker.offset_ms)],
    ["Punctuality", counts && counts.p99_ms !== null && `p50 ${duration(counts.p50_ms)}, p99 ${duration(counts.p99_ms)} of ${plural(counts.started, "start")}`],
    ["Failed", counts && counts.failed > 0 && `${plural(counts.failed, "run")}, ${percent(counts.failed / Math.max(counts.failed + counts.done, 1))}`],
    ["Queues", worker.queues.map((name, n) => html`${n > 0 && ", "}<${Link} key=${name} to=${link("/jobs", { queue: name })}><${Text} value=${name} /><//>`)],
    ["Tasks", html`<${Tasks} tasks=${worker.tasks} />`],
  ].filter(([, value]) => value);
  return html`<dl class="facts columns">${facts.map(([label, value]) => html`<div key=${label}><dt>${label}</dt><dd>${value}</dd></div>`)}</dl>`;
}

function clockWords(ms) {
  if (Math.abs(ms) < 1) return "agrees with the store";
  return `${duration(Math.abs(ms))} ${ms > 0 ? "behind" : "ahead of"} the store`;
}

function Tasks({ tasks }) {
  if (tasks === null) return html`<span class="quiet">not told by this release</span>`;
  if (tasks.length === 0) return html`<span class="quiet">none</span>`;
  return html`<details><summary>${plural(tasks.length, "task")}</summary>
    <ul class="plain">${tasks.map((name) => html`<li key=${name}><${Link} to=${link("/jobs", { task: name })}><${Text} value=${name} /><//></li>`)}</ul></details>`;
}

// --- What it runs

const COLUMNS = [
  { label: "Runs now", class: "wide", cell: (job) => html`<${Link} to=${link("/job", { id: job.id })}><${Text} value=${job.id} cut=${true} /><//>` },
  { label: "Task", class: "wide", cell: (job) => html`<${Text} value=${job.task} />` },
  { label: "Queue", cell: (job) => html`<${Text} value=${job.queue} />` },
  { label: "Started", class: "tight", cell: (job) => (job.started ? html`<${Ago} at=${job.started} />` : html`<span class="quiet" title="Its worker tells within seconds">not told yet</span>`) },
  { label: "Progress", class: "wide", cell: (job) => html`<${Progress} progress=${job.progress} />` },
];

function Progress({ progress }) {
  if (!progress) return null;
  const words = `${percent(progress.part)}${progress.words ? `: ${progress.words}` : ""}`;
  return html`<div><progress max="1" value=${progress.part} aria-label=${words}></progress><div class="quiet"><${Text} value=${words} cut=${true} /></div></div>`;
}

function Running({ worker, jobs, known }) {
  if (!known || jobs.length === 0) return null;
  return html`<${Table} caption=${`What ${worker.name} runs`} columns=${COLUMNS} rows=${jobs} keyOf=${(job) => job.id} open=${(job) => route.go(link("/job", { id: job.id }))} />`;
}
