// What ticks in the next 24 hours, moment by moment, and what ticks at the same moment.
import { withQuery } from "../api.js";
import { local, plural, wallClock, zone } from "../format.js";
import { html, useEffect, useState } from "../lib.js";
import { Panel } from "../parts/heading.js";
import { Badge, Empty, Loading, Note, Text, Trouble } from "../parts/marks.js";
import { Table } from "../parts/table.js";
import { Ago } from "../parts/time.js";
import { readInTurn } from "../read.js";
import { Link, link } from "../router.js";

// More ticks than this in a day, and a schedule is told of in one line.
const OFTEN = 48;
// As many ticks as the server lists at once, and how many schedules are asked for one by one.
const TICKS_MOST = 1000;
const ASKED_MOST = 40;
const SHOWN = 200;
const AGAIN_MS = 60_000;
const DAY_MS = 86_400_000;

export function Agenda({ schedules }) {
  // What would change the ticks: not how each schedule stands.
  const version = JSON.stringify(schedules.map((each) => [each.name, each.cron, each.every_ms, each.tz, each.paused, each.start, each.end]));
  const { agenda, problem } = useAgenda(schedules, version);
  const [all, setAll] = useState(false);
  if (problem && !agenda) return html`<${Trouble} problem=${problem} />`;
  if (!agenda) return html`<${Loading} />`;
  const together = agenda.moments.filter((each) => each.ticks.length > 1);
  const moments = all ? agenda.moments : agenda.moments.slice(0, SHOWN);
  return html`
    <${Often} often=${agenda.often} cut=${agenda.cut} />
    <${Panel} title="Moments" inner=${false} tools=${html`<span class="quiet">${together.length ? `${plural(together.length, "moment")} with several ticks at once` : "No two tick at once"}</span>`}>
      <${Table} caption="Ticks of the next 24 hours" columns=${COLUMNS} rows=${moments} keyOf=${(each) => each.at}
        empty=${html`<${Empty} title="Nothing ticks in the next 24 hours.">${agenda.paused.length ? `${plural(agenda.paused.length, "schedule")} paused.` : "Schedules that tick later are in the list."}<//>`} />
    <//>
    ${moments.length < agenda.moments.length && html`<button class="button" onClick=${() => setAll(true)}>Show all ${agenda.moments.length} moments</button>`}`;
}

const COLUMNS = [
  { label: `Your time`, class: "tight", cell: (each) => html`<span class="num">${local(each.at)}</span>` },
  { label: "In", class: "tight", cell: (each) => html`<${Ago} at=${each.at} />` },
  { label: "What ticks", class: "wide", cell: (each) => html`<${Ticks} ticks=${each.ticks} />` },
  { label: "", class: "tight", cell: (each) => each.ticks.length > 1 && html`<${Badge} kind="warn">${each.ticks.length} at once<//>` },
];

function Ticks({ ticks }) {
  return html`<ul class="plain">${ticks.map(
    (tick) => html`<li key=${tick.schedule}>
      <${Link} to=${link("/schedule", { name: tick.schedule })}><${Text} value=${tick.schedule} /><//>
      ${tick.tz !== zone() && html` <span class="quiet">${wallClock(tick.there)} ${tick.tz}</span>`}
      ${tick.change && html` <span class="badge warn" title=${tick.change}>clock change</span>`}
    </li>`,
  )}</ul>`;
}

function Often({ often, cut }) {
  const notes = [];
  if (often.length) {
    notes.push(html`<${Note}><strong>More than ${OFTEN} times a day, and not listed:</strong> ${often.map((each, n) => html`${n > 0 && ", "}<${Link}
      to=${link("/schedule", { name: each.name })}><${Text} value=${each.name} /><//> <span class="quiet">(${each.explained})</span>`)}<//>`);
  }
  if (cut) notes.push(html`<${Note} level="warn">There are too many ticks to list: some schedules are left out.<//>`);
  return notes.length ? html`<div class="notes">${notes}</div>` : null;
}

// --- Collecting ticks

function useAgenda(schedules, version) {
  const [state, setState] = useState({ agenda: null, problem: null });
  useEffect(() => {
    let left = false;
    const read = () =>
      collect(schedules, () => !left).then(
        (agenda) => left || setState({ agenda, problem: null }),
        (problem) => left || setState((before) => ({ ...before, problem })),
      );
    read();
    const timer = setInterval(() => document.hidden || read(), AGAIN_MS);
    return () => {
      left = true;
      clearInterval(timer);
    };
  }, [version]);
  return state;
}

/** All ticks of a day; if some schedules tick too often for one answer, the others are asked for by name. */
async function collect(schedules, wanted) {
  const found = await readInTurn(withQuery("/v1/simulation", { limit: TICKS_MOST }), wanted);
  const often = frequent(found);
  const rare = schedules.filter((each) => !each.paused && !each.problem && !often.has(each.name));
  let { ticks } = found;
  if (found.cut_at) {
    const asked = rare.slice(0, ASKED_MOST);
    const query = (name) => withQuery("/v1/simulation", { name, start: found.start, end: found.end, limit: OFTEN });
    ticks = (await Promise.all(asked.map((each) => readInTurn(query(each.name), wanted)))).flatMap((each) => each.ticks);
  }
  return {
    moments: moments(ticks.filter((tick) => !often.has(tick.schedule))),
    often: schedules.filter((each) => often.has(each.name)),
    cut: found.cut_at !== null && rare.length > ASKED_MOST,
    paused: found.paused,
  };
}

/** The names of schedules that tick too often, by what is known of the day. */
export function frequent({ start, end, cut_at: cut, ticks }) {
  const days = Math.max(Date.parse(cut ?? end) - Date.parse(start), 1) / DAY_MS;
  const counts = new Map();
  for (const tick of ticks) counts.set(tick.schedule, (counts.get(tick.schedule) ?? 0) + 1);
  // One tick in a short time says nothing yet.
  return new Set([...counts].filter(([, n]) => n > 1 && n / days > OFTEN).map(([name]) => name));
}

/** Ticks by moment, in order. */
export function moments(ticks) {
  const byTime = new Map();
  for (const tick of ticks) byTime.set(tick.at, [...(byTime.get(tick.at) ?? []), tick]);
  return [...byTime].toSorted(([a], [b]) => (a < b ? -1 : 1)).map(([at, each]) => ({ at, ticks: each }));
}
