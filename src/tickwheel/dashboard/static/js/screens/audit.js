// Who changed what: every write, newest first.
import { withQuery } from "../api.js";
import { onKeys } from "../keyboard.js";
import { html, useEffect, useRef } from "../lib.js";
import { useWatch } from "../live.js";
import { Heading, Panel } from "../parts/heading.js";
import { Badge, Empty, Loading, Note, Text, Trouble } from "../parts/marks.js";
import { Table } from "../parts/table.js";
import { Time } from "../parts/time.js";
import { Link, link, route, useRoute } from "../router.js";
import { session } from "../session.js";

const PAGE = 100;

export function Audit() {
  const { cursor, text = "" } = useRoute().query;
  const allowed = session.may("admin");
  const [page, problem] = useWatch(allowed ? withQuery("/v1/audit", { cursor, limit: PAGE }) : null);
  if (!allowed || problem?.status === 403) return html`<${Heading} title="Audit" /><${Refused} />`;
  return html`
    <${Heading} title="Audit"><span class="spring"></span><${Filter} text=${text} /><//>
    ${page ? html`<${Page} page=${page} cursor=${cursor} text=${text} />` : problem ? html`<${Trouble} problem=${problem} />` : html`<${Loading} />`}`;
}

function Refused() {
  return html`<${Note} level="warn"><strong>The audit log is for keys with the scope admin.</strong>
    <div>Sign in with such a key, or ask somebody who has one. On the machine itself: <code>tickwheel audit</code>.</div><//>`;
}

function Filter({ text }) {
  const search = useRef(null);
  useEffect(() => onKeys({ "/": () => search.current?.focus() }), []);
  return html`<input ref=${search} type="search" class="input filter" placeholder="Filter this page" aria-label="Filter this page" value=${text}
    onInput=${(event) => route.set({ text: event.target.value }, { replace: true })} />`;
}

function Page({ page, cursor, text }) {
  const wanted = text.toLowerCase();
  const rows = keyed(page.entries).filter((entry) => [entry.who, entry.action, entry.target, entry.source, entry.outcome, entry.detail].some((part) => part.toLowerCase().includes(wanted)));
  const empty = page.entries.length
    ? html`<${Empty} title="Nothing on this page matches.">${page.cursor ? "Older pages may have it." : "Filter by something else."}<//>`
    : html`<${Empty} title=${cursor ? "There is nothing older." : "Nothing has been changed yet."}>${cursor ? "" : "Every write is noted here: who, what, from where, and how it ended."}<//>`;
  return html`<${Panel} inner=${false}><${Table} caption="Audit log" columns=${COLUMNS} rows=${rows} keyOf=${(entry) => entry.key} empty=${empty} /><//>
    <div class="pages">
      ${cursor && html`<${Link} class="button" to=${link("/audit", { text })}>Newest<//>`}
      ${page.cursor && html`<${Link} class="button" to=${link("/audit", { text, cursor: page.cursor })}>Older<//>`}
    </div>`;
}

/** Entries have no ids: equal ones of the same millisecond are told apart by their order. */
function keyed(entries) {
  const seen = new Map();
  return entries.toReversed().map((entry) => {
    const fields = JSON.stringify(entry);
    const n = (seen.get(fields) ?? 0) + 1;
    seen.set(fields, n);
    return { ...entry, key: `${fields} ${n}` };
  }).reverse();
}

const COLUMNS = [
  { label: "When", class: "tight", cell: (entry) => html`<${Time} at=${entry.at} />` },
  { label: "Who", class: "wide", cell: (entry) => html`<${Text} value=${entry.who} />` },
  { label: "What", class: "tight", cell: (entry) => html`<${Text} value=${words(entry.action)} />` },
  { label: "Of what", class: "wide", cell: (entry) => html`<${Target} entry=${entry} />` },
  { label: "Outcome", class: "tight", cell: (entry) => html`<${Badge} kind=${entry.outcome === "ok" ? "ok" : "bad"}>${entry.outcome}<//>` },
  { label: "Detail", class: "wide", cell: (entry) => entry.detail && html`<${Text} value=${entry.detail} />` },
  { label: "From", cell: (entry) => html`<${Text} value=${entry.source} />` },
];

/** "cancel_job" and "job.cancel" as words. */
const words = (action) => action.replace(/[._]/g, " ");

/** Where the target is shown, by what was done to it; null if nowhere. */
export function place({ action, target }) {
  if (!target) return null;
  if (/(^|_|\.)jobs?(_|\.|$)/.test(action)) return link("/job", { id: target });
  if (/(^|_|\.)schedules?(_|\.|$)/.test(action)) return link("/schedule", { name: target });
  if (/(^|_|\.)queues?(_|\.|$)/.test(action)) return link("/jobs", { queue: target });
  return null;
}

function Target({ entry }) {
  if (!entry.target) return html`<span class="quiet">–</span>`;
  const to = place(entry);
  const name = html`<${Text} value=${entry.target} />`;
  // Too long a target was cut, and leads nowhere.
  return to && !entry.target.endsWith("…") ? html`<${Link} to=${to}>${name}<//>` : name;
}
