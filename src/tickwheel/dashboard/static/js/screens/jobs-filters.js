// The same filters as in the search box, to choose from.
import { html, useState } from "../lib.js";
import { route } from "../router.js";
import { ENDED_VIEWS, moment } from "./jobs-query.js";

const COMING = { "due in 10 minutes": ["", "+10m"], "due in an hour": ["", "+1h"], "due in 24 hours": ["", "+24h"], "due in 7 days": ["", "+7d"] };
const PAST = { "last 10 minutes": ["-10m", ""], "last hour": ["-1h", ""], "last 24 hours": ["-24h", ""], "last 7 days": ["-7d", ""] };

const change = (fields) => route.set({ ...fields, cursor: null, page: null });

export function Filters({ query, known, load }) {
  return html`<div class="filters" onFocusIn=${load}>
    <${Named} label="Queue" name="queue" query=${query} options=${known.queue} />
    <${Named} label="Task" name="task" query=${query} options=${known.task} />
    <${Named} label="Worker" name="worker" query=${query} options=${known.worker} />
    <${Named} label="Meta" name="meta" query=${query} options=${known.meta.map((name) => `${name}=`)} placeholder="name=value" />
    <${When} query=${query} />
  </div>`;
}

function Named({ label, name, query, options, placeholder = "any" }) {
  const list = `known-${name}`;
  return html`<label class="filter"><span>${label}</span>
    <input class="input" list=${list} autocomplete="off" placeholder=${placeholder} value=${query[name] ?? ""} onChange=${(event) => change({ [name]: event.target.value })} />
    <datalist id=${list}>${options.map((each) => html`<option value=${each} />`)}</datalist>
  </label>`;
}

function When({ query }) {
  const { from = "", until = "" } = query;
  const presets = ENDED_VIEWS.includes(query.view) ? PAST : query.view ? COMING : { ...COMING, ...PAST };
  const chosen = Object.entries(presets).find(([, pair]) => pair[0] === from && pair[1] === until)?.[0];
  const [exact, setExact] = useState(false);
  const value = exact ? "exact" : (chosen ?? (from || until ? "exact" : "any"));
  const choose = (event) => {
    const picked = event.target.value;
    setExact(picked === "exact");
    if (picked === "any") change({ from: null, until: null });
    else if (picked !== "exact") change({ from: presets[picked][0], until: presets[picked][1] });
  };
  return html`<label class="filter"><span>Time</span>
      <select class="input" value=${value} onChange=${choose}>
        <option value="any">any time</option>
        ${Object.keys(presets).map((each) => html`<option value=${each}>${each}</option>`)}
        <option value="exact">exactly…</option>
      </select>
    </label>
    ${value === "exact" && html`<${Exactly} label="From" name="from" text=${from} /><${Exactly} label="Until" name="until" text=${until} />`}`;
}

function Exactly({ label, name, text }) {
  const at = text ? moment(text, Date.now()) : null;
  const changed = (event) => change({ [name]: event.target.value ? new Date(event.target.value).toISOString() : null });
  return html`<label class="filter"><span>${label}</span>
    <input class="input" type="datetime-local" step="1" value=${at === null ? "" : field(at)} onChange=${changed} />
  </label>`;
}

/** As such a field wants it: local time without a zone. */
function field(ms) {
  const date = new Date(ms);
  return new Date(ms - date.getTimezoneOffset() * 60_000).toISOString().slice(0, 19);
}
