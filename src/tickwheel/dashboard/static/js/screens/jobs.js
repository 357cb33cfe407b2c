// Find jobs, and cancel, rerun or delete them: some, or all that match.
import { get, withQuery } from "../api.js";
import { compact, count, plural } from "../format.js";
import { html, useEffect, useMemo, useRef, useState } from "../lib.js";
import { live, useWatch } from "../live.js";
import { Heading } from "../parts/heading.js";
import { Empty, Loading, Trouble } from "../parts/marks.js";
import { Search } from "../parts/search.js";
import { Table } from "../parts/table.js";
import { useNow } from "../parts/time.js";
import { Link, link, route, useRoute } from "../router.js";
import { useSession } from "../session.js";
import { BulkBar } from "./jobs-bulk.js";
import { COLUMNS } from "./jobs-columns.js";
import { Filters } from "./jobs-filters.js";
import { FIELDS, VIEWS, asked, compose, fault, parse, suggestions } from "./jobs-query.js";

const PAGE = 50;
const MINUTE_MS = 60_000;
// From which page each cursor was reached, while the tab is open: the way back.
const cameFrom = new Map();

export function Jobs() {
  const { query } = useRoute();
  const { selected, setSelected } = useSelection(query);
  const [known, learn] = useKnown();
  const wrong = fault(query);
  const { page, problem, stale, path } = usePage(query, wrong);
  const may = useSession().may("operate");
  useEffect(() => {
    if (page) learn.meta(page.jobs);
  }, [page]);

  return html`
    <${Heading} title="Jobs" />
    <${Tabs} query=${query} />
    <${Search} label="Search jobs" placeholder='queue:mail task:report meta.customer:42 due<10m, or any text' value=${compose(query)}
      known=${known} suggest=${(text, caret) => suggestions(text, caret, known)} onSearch=${search} onFocus=${learn.load} />
    ${wrong && html`<div class="note bad" role="alert"><div><bdi>${wrong}</bdi></div></div>`}
    <${Filters} query=${query} known=${known} load=${learn.load} />
    ${problem && html`<${Trouble} problem=${problem} retry=${() => live.refresh()} />`}
    ${may && page && html`<${BulkBar} ...${{ query, page, stale, selected, setSelected }} />`}
    ${!wrong && html`<section class=${`panel jobs ${stale ? "stale" : ""}`} aria-label="Jobs found" aria-busy=${stale} inert=${stale}>
      ${page
        ? html`<${Table} key=${path} caption="Jobs" columns=${COLUMNS} rows=${page.jobs} keyOf=${(job) => job.id} selected=${selected} onSelect=${may ? setSelected : undefined}
            open=${(job) => route.go(link("/job", { id: job.id }))} empty=${html`<${Nothing} query=${query} page=${page} />`} />`
        : !problem && html`<${Loading} />`}
      ${page && html`<${Pager} query=${query} page=${page} />`}
    </section>`}`;
}

/** Another search, from its first page. An id alone leads to its job. */
function search(text) {
  const { id, view, ...fields } = parse(text);
  if (id) return route.go(link("/job", { id }));
  const cleared = Object.fromEntries(FIELDS.map((name) => [name, null]));
  const views = view === undefined ? {} : { view };
  route.set({ ...cleared, ...fields, ...views, cursor: null, page: null });
}

function Tabs({ query }) {
  const [overview] = useWatch("/v1/overview");
  const here = VIEWS.includes(query.view) ? query.view : "";
  const others = { ...query, cursor: null, page: null };
  const element = useRef(null);
  // On a narrow screen the current one may be out of sight.
  useEffect(() => {
    const current = element.current.querySelector("[aria-current]");
    element.current.scrollLeft = current.offsetLeft - element.current.offsetLeft - 40;
  }, [here]);
  return html`<nav class="tabs" aria-label="Views" ref=${element}>
    ${["", ...VIEWS].map((view) => {
      const number = ["running", "dead"].includes(view) ? overview?.stats?.[view] : undefined;
      return html`<${Link} key=${view} to=${link("/jobs", { ...others, view })} aria-current=${view === here ? "page" : undefined}>
        ${view === "" ? "All" : view[0].toUpperCase() + view.slice(1)}${number > 0 && html` <span class="quiet num">${compact(number)}</span>`}<//>`;
    })}
  </nav>`;
}

// --- What is found

/** The page that the URL asks for, unless something is `wrong` with it. The first is kept up to date; later ones stay as
 * they were read. */
function usePage(query, wrong) {
  const relative = [query.from, query.until].some((text) => /^[+-]/.test(text ?? ""));
  const minute = Math.floor(useNow() / MINUTE_MS) * MINUTE_MS;
  const words = JSON.stringify(query);
  const path = useMemo(() => (wrong ? null : withQuery("/v1/jobs", { ...asked(query, minute), limit: PAGE, brief: true, cursor: query.cursor })), [words, relative && !query.cursor && minute]);
  const [watched, watchProblem] = useWatch(query.cursor ? null : path);
  const [read, readProblem] = useRead(query.cursor ? path : null);
  const [page, problem] = query.cursor ? [read, readProblem] : [watched, watchProblem];
  // While another is on its way, the one before stays in sight.
  const last = useRef({});
  if (page) last.current = { page, path };
  if (wrong) return { page: undefined, problem: null, stale: false };
  return { page: problem && !page ? undefined : last.current.page, path: last.current.path, stale: !page && !problem, problem };
}

function useRead(path) {
  const [answer, setAnswer] = useState({});
  useEffect(() => {
    if (!path) return undefined;
    let wanted = true;
    const keep = (found) => wanted && setAnswer({ path, ...found });
    get(path).then((page) => keep({ page }), (problem) => keep({ problem }));
    return () => (wanted = false);
  }, [path]);
  return answer.path === path ? [answer.page, answer.problem ?? null] : [undefined, null];
}

function Nothing({ query, page }) {
  if (page.cursor) return html`<${Empty} title="Nothing found so far.">${plural(page.looked ?? 0, "job")} looked at; there are more to look at below.<//>`;
  const narrowed = FIELDS.some((name) => query[name]);
  const what = VIEWS.includes(query.view) ? `No ${query.view} jobs` : "No jobs";
  return html`<${Empty} title=${narrowed ? `${what} match.` : `${what}.`}>
    ${narrowed && html`<${Link} to=${link("/jobs", { view: query.view })}>Drop the filters<//>`}
  <//>`;
}

function Pager({ query, page }) {
  const number = Number(query.page) || 1;
  // Fewer than asked for, and yet more to come: the look was bounded.
  const bounded = page.cursor !== null && page.jobs.length < PAGE;
  const next = page.cursor && link("/jobs", { ...query, cursor: page.cursor, page: number + 1 });
  if (page.cursor && !cameFrom.has(page.cursor)) cameFrom.set(page.cursor, query.cursor ?? null);
  const back = query.cursor && cameFrom.has(query.cursor) ? link("/jobs", { ...query, cursor: cameFrom.get(query.cursor), page: number > 2 ? number - 1 : null }) : null;
  const first = link("/jobs", { ...query, cursor: null, page: null });
  if (!query.cursor && !page.cursor && page.jobs.length === 0) return null;
  return html`<nav class="pager" aria-label="Pages">
    <span class="quiet">${query.cursor ? `Page ${count(number)}, as it was when read` : page.cursor ? "Page 1, live" : `${plural(page.jobs.length, "job")}, live`}${page.looked > page.jobs.length && ` · ${count(page.looked)} looked at`}</span>
    <span class="spring"></span>
    ${query.cursor && html`<${Link} class="button small" to=${first}>First page<//>`}
    ${back && html`<${Link} class="button small" to=${back}>Back<//>`}
    ${next && html`<${Link} class="button small" to=${next}>${bounded ? "Go on looking" : "Next"}<//>`}
  </nav>`;
}

// --- What is selected, and what is known

/** The selection belongs to one page of one query. */
function useSelection(query) {
  const [selected, setSelected] = useState(() => new Set());
  useEffect(() => setSelected(new Set()), [JSON.stringify(query)]);
  return { selected, setSelected };
}

/** Names to suggest: read when somebody is about to search, and learnt from what is seen. */
function useKnown() {
  const [known, setKnown] = useState({ queue: [], task: [], worker: [], meta: [], view: VIEWS });
  const loaded = useRef(false);
  const learn = useMemo(() => {
    const read = async (kind, path, list) => {
      const answer = await get(path).catch(() => null);
      if (answer) setKnown((now) => ({ ...now, [kind]: [...new Set([...now[kind], ...answer[list].map((each) => each.name)])].sort() }));
    };
    return {
      load() {
        if (loaded.current) return;
        loaded.current = true;
        read("queue", "/v1/queues", "queues");
        read("task", "/v1/tasks", "tasks");
        read("worker", "/v1/workers", "workers");
      },
      meta(jobs) {
        setKnown((now) => {
          const tasks = new Set([...now.task, ...jobs.map((job) => job.task)]);
          const meta = new Set([...now.meta, ...jobs.flatMap((job) => Object.keys(job.meta))]);
          if (tasks.size === now.task.length && meta.size === now.meta.length) return now;
          return { ...now, task: [...tasks].sort(), meta: [...meta].sort().slice(0, 100) };
        });
      },
    };
  }, []);
  return [known, learn];
}
