// Is everything all right? What comes next?
import { withQuery } from "../api.js";
import { compact, count, duration, percent, plural, rate } from "../format.js";
import { html, useState } from "../lib.js";
import { live, useWatch } from "../live.js";
import { Chart } from "../parts/chart.js";
import { Heading, Panel } from "../parts/heading.js";
import { Empty, Loading, Note, Text, Trouble, Unseen } from "../parts/marks.js";
import { Table } from "../parts/table.js";
import { Ago } from "../parts/time.js";
import { Wheel } from "../parts/wheel.js";
import { Link, link } from "../router.js";

const RANGES = { "1h": "1 hour", "24h": "24 hours", "7d": "7 days", "90d": "90 days" };

export function Overview() {
  const [overview, problem] = useWatch("/v1/overview");
  const [range, setRange] = useState("1h");
  const [history, unseen] = useWatch(withQuery("/v1/history", { range }));
  if (problem && !overview) return html`<${Heading} title="Overview" /><${Trouble} problem=${problem} retry=${() => live.refresh()} />`;
  if (!overview) return html`<${Heading} title="Overview" /><${Loading} />`;
  const past = (chart) => (history ? chart() : unseen ? html`<${Unseen} problem=${unseen} retry=${() => live.refresh()} />` : html`<${Loading} />`);
  return html`
    <${Heading} title="Overview">
      <span class="spring"></span>
      <div class="ranges" role="group" aria-label="Time range of the charts">
        ${Object.entries(RANGES).map(
          ([each, words]) => html`<button class="button small" aria-pressed=${each === range} onClick=${() => setRange(each)}>${words}</button>`,
        )}
      </div>
    <//>
    <${Warnings} overview=${overview} />
    <${Figures} overview=${overview} />
    <div class="grid">
      <${Panel} title="The wheel: what falls due" class="wheel-panel"><${Wheel} /><//>
      <${Panel} title="Punctuality: from due to start" class="half" tools=${html`<${ObjectiveMark} overview=${overview} />`}>
        ${past(() => html`<${Punctuality} overview=${overview} history=${history} />`)}
      <//>
      <${Panel} title="Runs per second" class="half">${past(() => html`<${Rates} history=${history} />`)}<//>
      <${Panel} title="Jobs waiting and running" class="half">${past(() => html`<${Depth} history=${history} />`)}<//>
      <${Panel} title="Failures by task, last hour" class="half" inner=${false}><${Failures} failures=${overview.failures} /><//>
    </div>`;
}

// --- What needs a person

function Warnings({ overview }) {
  const notes = [];
  for (const each of overview.unserved) {
    notes.push(html`<${Note} level="bad"><strong>No worker serves <${Text} value=${each.task} /> in queue <${Text} value=${each.queue} />.</strong>
      <div>The first of its jobs was due <${Ago} at=${each.since} />. Start a worker that knows the task.${" "}<${Link} to=${link("/jobs", { view: "ready", queue: each.queue, task: each.task })}>Show them<//></div><//>`);
  }
  for (const each of overview.problems) {
    notes.push(html`<${Note} level=${each.level}><strong>${each.about}</strong><div>${each.words}${each.fix && html` <span class="quiet">${each.fix}</span>`}</div><//>`);
  }
  if (overview.paused.length) {
    notes.push(html`<${Note} level="warn"><strong>${plural(overview.paused.length, "queue")} paused:</strong> ${overview.paused.slice(0, 10).join(", ")}${overview.paused.length > 10 && " …"}.${" "}<${Link} to="/queues">Show queues<//><//>`);
  }
  return notes.length ? html`<div class="notes">${notes}</div>` : null;
}

// --- Figures

function Figures({ overview }) {
  const { stats, rates, punctuality } = overview;
  const late = stats.oldest_late_ms;
  return html`<dl class="figures" aria-label="Now">
    <${Figure} label="Waiting" value=${compact(stats.waiting)} title=${count(stats.waiting)} to="/jobs?view=waiting" />
    <${Figure} label="Running" value=${compact(stats.running)} title=${count(stats.running)} to="/jobs?view=running" />
    <${Figure} label="Dead" value=${compact(stats.dead)} title=${count(stats.dead)} to="/dead" kind=${stats.dead ? "bad" : ""} />
    <${Figure} label="Oldest due" value=${late ? `${duration(late)} late` : stats.oldest_due ? "on time" : "none"} kind=${late > 60_000 ? "bad" : late > 1000 ? "warn" : ""} to="/jobs?view=ready" />
    <${Figure} label="Done per second" value=${rate(rates.done)} />
    <${Figure} label="Failed per second" value=${rate(rates.failed)} kind=${rates.failed > 0 ? "warn" : ""} />
    <${Figure} label="Late, p99" value=${punctuality.p99_ms === null ? "–" : duration(punctuality.p99_ms)} />
    <${Figure} label="Workers" value=${count(overview.workers)} to="/workers" kind=${overview.workers === 0 ? "warn" : ""} />
  </dl>`;
}

function Figure({ label, value, title, kind = "", to }) {
  const inner = html`<dt>${label}</dt><dd class=${`num ${kind}`} title=${title}>${to ? html`<${Link} to=${to}>${value}<//>` : value}</dd>`;
  return html`<div class="figure">${inner}</div>`;
}

// --- Charts

function ObjectiveMark({ overview }) {
  const { objective, punctuality } = overview;
  if (!objective) return html`<span class="quiet">No objective is set</span>`;
  if (punctuality.share === null) return html`<span class="quiet">Objective: ${objective.text}</span>`;
  const met = punctuality.share >= objective.share;
  return html`<span class=${`badge ${met ? "ok" : "bad"}`}>${percent(punctuality.share)} within ${duration(objective.within_ms)}, objective ${percent(objective.share)}</span>`;
}

function Punctuality({ overview, history }) {
  if (!history.p99_ms.some((value) => value !== null)) {
    return html`<${Empty} title="No starts have been reported yet.">${overview.workers > overview.reporting ? "Workers report how punctual they are if their metrics are on." : "As soon as jobs start, their lateness is shown here."}<//>`;
  }
  const series = [
    { label: "p50", values: history.p50_ms, colour: "accent", fill: true },
    { label: "p99", values: history.p99_ms, colour: "running" },
  ];
  if (overview.objective) {
    series.push({ label: "objective", values: history.times.map(() => overview.objective.within_ms), colour: "dead", dash: true });
  }
  return html`<${Chart} label="Lateness of starts" times=${history.times} series=${series} format=${duration} log=${true} least=${0.5} />`;
}

function Rates({ history }) {
  const series = [
    { label: "done", values: history.done, colour: "done", fill: true },
    { label: "failed", values: history.failed, colour: "warn" },
    { label: "dead", values: history.dead, colour: "dead" },
  ];
  return html`<${Chart} label="Runs per second" times=${history.times} series=${series} format=${rate} least=${1} />`;
}

function Depth({ history }) {
  const series = [
    { label: "waiting", values: history.waiting, colour: "waiting", fill: true },
    { label: "running", values: history.running, colour: "running" },
  ];
  return html`<${Chart} label="Jobs" times=${history.times} series=${series} format=${(n) => compact(n === null ? n : Math.round(n))} least=${10} />`;
}

// --- Failures

const FAILURE_COLUMNS = [
  { label: "Task", cell: (each) => html`<${Link} to=${link("/jobs", { view: "retrying", task: each.task })}><${Text} value=${each.task} /><//>` },
  { label: "Done", class: "right", cell: (each) => count(each.done) },
  { label: "Failed runs", class: "right", cell: (each) => html`<span class=${each.failed ? "late" : ""}>${count(each.failed)}</span>` },
  { label: "Dead", class: "right", cell: (each) => (each.dead ? html`<${Link} class="very-late" to=${link("/dead", { task: each.task })}>${count(each.dead)}<//>` : "0") },
  { label: "Share", class: "right", cell: (each) => percent(each.failed / Math.max(each.failed + each.done, 1)) },
];

function Failures({ failures }) {
  const failing = failures.filter((each) => each.failed || each.dead);
  return html`<${Table} caption="Failures by task" columns=${FAILURE_COLUMNS} rows=${failing} keyOf=${(each) => each.task}
    empty=${html`<${Empty} title="Nothing has failed in the last hour." />`} />`;
}
