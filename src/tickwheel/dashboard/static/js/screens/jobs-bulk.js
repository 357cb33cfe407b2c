// What can be done to the selected jobs, or to all that match.
import { plural } from "../format.js";
import { html } from "../lib.js";
import { ACTIONS, bulk, byFilter, byIds, byPages, countOf, serverNow } from "../parts/bulk.js";
import { Menu } from "../parts/menu.js";
import { ENDED_VIEWS, FIELDS, VIEWS, asked, compose, filterOf } from "./jobs-query.js";

const ENDED_STATES = ENDED_VIEWS;

/** Which actions make sense in a view. */
export function actionsOf(view) {
  if (ENDED_VIEWS.includes(view)) return ["rerun", "delete"];
  return VIEWS.includes(view) ? ["cancel"] : ["cancel", "rerun", "delete"];
}

/** Those of the selected jobs that an action is for. A job that is no longer on the page is left to the server. */
function suited(action, page, selected) {
  const known = new Map(page.jobs.map((job) => [job.id, job.state]));
  return [...selected].filter((id) => !known.has(id) || ENDED_STATES.includes(known.get(id)) === (action !== "cancel"));
}

export function BulkBar({ query, page, stale, selected, setSelected }) {
  const view = VIEWS.includes(query.view) ? query.view : "";
  // Without a view only what waits or runs can be told apart from what must stay.
  const all = view ? actionsOf(view) : ["cancel"];
  if (page.jobs.length === 0 && selected.size === 0) return null;
  return html`<div class="bulk-bar" role="group" aria-label="Actions" inert=${stale}>
    ${selected.size > 0
      ? html`<strong role="status">${plural(selected.size, "job")} selected</strong>
          ${actionsOf(view).map((action) => {
            const ids = suited(action, page, selected);
            return html`<button key=${action} class=${`button small ${ACTIONS[action].danger ? "danger" : ""}`} disabled=${ids.length === 0}
              onClick=${() => onSelected(action, ids, setSelected)}>${ACTIONS[action].verb}${ids.length !== selected.size && ids.length > 0 ? ` ${ids.length}` : ""}</button>`;
          })}
          <button class="button small plain" onClick=${() => setSelected(new Set())}>Clear the selection</button>`
      : html`<span class="quiet">Select jobs with their boxes or <kbd>x</kbd></span>`}
    <span class="spring"></span>
    <${Menu} class="small" label="All that match…" title="All jobs that match">
      ${all.map((action) => html`<button key=${action} onClick=${() => onMatching(action, query)}>${ACTIONS[action].verb} all that match</button>`)}
      ${!view && html`<span class="title">To rerun or delete, choose done, dead or cancelled.</span>`}
    <//>
  </div>`;
}

async function onSelected(action, ids, setSelected) {
  const begun = await bulk({ action, total: ids.length, about: "selected", batches: () => byIds(`/v1/jobs/${action}`, ids) });
  if (begun) setSelected(new Set());
}

async function onMatching(action, query) {
  const start = await serverNow();
  const found = await countFor(action, query, start);
  if (!found) return;
  await bulk({
    action,
    total: found.count,
    exact: found.exact,
    about: html`that match <b>${describe(query)}</b>`,
    more: action === "cancel" ? null : "Jobs that end from now on are left alone.",
    typed: action === "delete" ? "delete" : null,
    batches: () => batches(action, query, start),
  });
}

/** How many it is about; cancelling without a view is about what waits or runs. */
async function countFor(action, query, start) {
  if (query.view && VIEWS.includes(query.view)) return countOf(asked(query, start));
  const counts = await Promise.all(["waiting", "running"].map((state) => countOf({ ...asked(query, start), state })));
  if (counts.some((each) => !each)) return null;
  return { count: counts[0].count + counts[1].count, exact: counts.every((each) => each.exact) };
}

async function* batches(action, query, start) {
  const path = `/v1/jobs/${action}`;
  const filter = filterOf(query, start);
  if (action === "cancel" && !query.view) {
    yield* byFilter(path, { ...filter, state: "waiting" });
    yield* byPages(path, { ...asked(query, start), state: "running" });
  } else if (filter.view === "running") yield* byPages(path, asked(query, start));
  else yield* byFilter(path, filter);
}

function describe(query) {
  const narrowed = FIELDS.some((name) => query[name]);
  const view = VIEWS.includes(query.view) ? query.view : "waiting or running";
  return narrowed ? html`${view}, <bdi class="mono">${compose(query)}</bdi>` : view;
}
