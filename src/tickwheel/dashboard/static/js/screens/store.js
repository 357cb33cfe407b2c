// The store: what it guarantees, what is wrong with it, how large it is, how it answers.
import { bytes, count, duration, plural, rate } from "../format.js";
import { html } from "../lib.js";
import { useWatch } from "../live.js";
import { Heading, Panel } from "../parts/heading.js";
import { Badge, CopyButton, Empty, Loading, Note, Text, Trouble } from "../parts/marks.js";
import { Table } from "../parts/table.js";

export function StoreScreen() {
  const [store, problem] = useWatch("/v1/store");
  if (!store) return html`<${Heading} title="Store" />${problem ? html`<${Refused} problem=${problem} />` : html`<${Loading} />`}`;
  return html`
    <${Heading} title="Store"><span class="quiet"><code><${Text} value=${store.name} /></code></span><//>
    <div class="grid">
      <${Panel} title="What is guaranteed" class="half"><${Guarantees} durability=${store.durability} /><//>
      <${Panel} title="Size" class="half"><${Sizes} store=${store} /><//>
      <${Panel} title="Findings" inner=${false} tools=${html`<${FindingCounts} findings=${store.findings} />`}><${Findings} findings=${store.findings} /><//>
      <${Panel} title="Calls by this server, last minute" inner=${false}><${Calls} calls=${store.calls} /><//>
    </div>`;
}

function Refused({ problem }) {
  if (problem.status !== 403) return html`<${Trouble} problem=${problem} />`;
  return html`<${Note} level="warn"><strong>Your key does not see the store.</strong>
    <div>It is limited to some queues or tasks. The store is shown to keys that may see everything: <code>tickwheel keys create NAME --scope read</code>.</div><//>`;
}

// --- Guarantees

const THREATS = [
  ["process_crash", "A killed process", "crashes, restarts and kill -9 of workers and servers"],
  ["power_loss", "A power loss", "the machine stops at once"],
  ["machine_loss", "A lost machine", "its disk is gone for good"],
];

function Guarantees({ durability }) {
  return html`<p class="rule-words">${durability.summary}</p>
    <p class="quiet">A job that was added, and acknowledged, survives:</p>
    <ul class="guarantees">${THREATS.map(([field, words, more]) => {
      const safe = durability[field];
      return html`<li key=${field}><${Badge} kind=${safe ? "ok" : field === "process_crash" ? "bad" : "warn"}>${safe ? "✓ yes" : "✗ no"}<//><span><b>${words}</b> <span class="quiet">${more}</span></span></li>`;
    })}</ul>
    ${durability.window_ms !== null && durability.window_ms !== undefined && html`<p>At most the jobs of the last ${duration(durability.window_ms)} can be lost.</p>`}
    ${durability.fixes.length > 0 && html`<h3>To survive more</h3><ul class="fixes">${durability.fixes.map((fix) => html`<li key=${fix}>${fix}</li>`)}</ul>`}`;
}

// --- Sizes

function Sizes({ store }) {
  return html`<dl class="facts">
    <dt>Kind</dt><dd>${store.kind}</dd>
    <dt>Release</dt><dd>Tickwheel ${store.version}</dd>
    ${store.sizes.map((size) => html`<dt key=${size.name}>${size.name}</dt><dd class="num">${sized(size)}</dd>`)}
  </dl>
  ${store.sizes.length === 0 && html`<p class="quiet">This store does not tell how large it is.</p>`}`;
}

const sized = ({ value, unit }) => (unit === "bytes" ? html`<span title=${`${count(value)} bytes`}>${bytes(value)}</span>` : `${count(value)} ${unit}`);

// --- Findings

const LEVELS = ["bad", "warn", "ok"];
const LEVEL_WORDS = { bad: "problem", warn: "warning", ok: "fine" };

function FindingCounts({ findings }) {
  const of = (level) => findings.filter((each) => each.level === level).length;
  return html`${of("bad") > 0 && html`<${Badge} kind="bad">${plural(of("bad"), "problem")}<//>`}
    ${of("warn") > 0 && html`<${Badge} kind="warn">${plural(of("warn"), "warning")}<//>`}
    ${of("bad") + of("warn") === 0 && html`<${Badge} kind="ok">all fine<//>`}`;
}

const FINDING_COLUMNS = [
  { label: "Level", class: "tight", cell: (each) => html`<${Badge} kind=${each.level}>${LEVEL_WORDS[each.level]}<//>` },
  { label: "About", class: "wide", cell: (each) => html`<${Text} value=${each.about} />` },
  { label: "What", class: "wide", cell: (each) => html`<${Text} value=${each.words} />` },
  { label: "What to do", class: "wide", cell: (each) => each.fix && html`<div class="fix"><${Text} value=${each.fix} /> ${each.fix.startsWith("tickwheel ") && html`<${CopyButton} text=${each.fix} class="small plain" />`}</div>` },
];

function Findings({ findings }) {
  const rows = findings.map((each, n) => ({ ...each, n })).toSorted((a, b) => LEVELS.indexOf(a.level) - LEVELS.indexOf(b.level) || a.n - b.n);
  return html`<${Table} caption="Findings" columns=${FINDING_COLUMNS} rows=${rows} keyOf=${(each) => `${each.level} ${each.about} ${each.words}`} empty=${html`<${Empty} title="Nothing to tell." />`} />`;
}

// --- Calls

const CALL_COLUMNS = [
  { label: "Call", cell: (each) => html`<code>${each.method}</code>` },
  { label: "Per second", class: "right", cell: (each) => rate(each.per_s) },
  { label: "Mean", class: "right", cell: (each) => milliseconds(each.mean_ms) },
  { label: "p99", class: "right", cell: (each) => milliseconds(each.p99_ms) },
  { label: "Since it started", class: "right", cell: (each) => count(each.count) },
  { label: "Errors", class: "right", cell: (each) => html`<span class=${each.errors ? "very-late" : "quiet"}>${count(each.errors)}</span>` },
];

// Most take less than a millisecond.
const milliseconds = (ms) => (ms === null || ms === undefined ? "–" : ms < 10 ? `${ms.toFixed(2)} ms` : duration(ms));

function Calls({ calls }) {
  return html`<${Table} caption="Calls" columns=${CALL_COLUMNS} rows=${calls.toSorted((a, b) => b.per_s - a.per_s || b.count - a.count)} keyOf=${(each) => each.method}
    empty=${html`<${Empty} title="No calls yet." />`} />`;
}
