// Everything that ticks: what, when, and how the last runs went.
import { wallClock } from "../format.js";
import { onKeys } from "../keyboard.js";
import { html, useEffect, useRef } from "../lib.js";
import { live, useWatch } from "../live.js";
import { Heading, Panel } from "../parts/heading.js";
import { Badge, Empty, Loading, Text, Trouble } from "../parts/marks.js";
import { ScheduleActions } from "../parts/schedule-actions.js";
import { addSchedule } from "../parts/schedule-form.js";
import { LastRuns } from "../parts/strip.js";
import { Table } from "../parts/table.js";
import { Ago } from "../parts/time.js";
import { Link, link, route, useRoute } from "../router.js";
import { session } from "../session.js";
import { Agenda } from "./schedules-agenda.js";

export function Schedules() {
  const { query } = useRoute();
  const [document, problem] = useWatch("/v1/schedules");
  const schedules = document?.schedules;
  const agenda = query.view === "agenda";
  return html`
    <${Heading} title="Schedules">
      <span class="spring"></span>
      ${session.may("operate") && html`<button class="button main" onClick=${() => addSchedule((schedules ?? []).map((each) => each.name))}>Add schedule</button>`}
    <//>
    <nav class="tabs" aria-label="Views">
      <${Link} to="/schedules" aria-current=${agenda ? undefined : "page"}>All schedules<//>
      <${Link} to=${link("/schedules", { view: "agenda" })} aria-current=${agenda ? "page" : undefined}>Next 24 hours<//>
    </nav>
    ${problem && !schedules ? html`<${Trouble} problem=${problem} retry=${() => live.refresh()} />` : !schedules ? html`<${Loading} />` : agenda ? html`<${Agenda} schedules=${schedules} />` : html`<${List} schedules=${schedules} text=${query.text ?? ""} />`}`;
}

function List({ schedules, text }) {
  const search = useRef(null);
  useEffect(() => onKeys({ "/": () => search.current?.focus() }), []);
  const wanted = text.toLowerCase();
  const rows = schedules.filter((each) => [each.name, each.task, each.explained].some((part) => part?.toLowerCase().includes(wanted)));
  const tools = html`<input ref=${search} type="search" class="input filter" placeholder="Filter by name, task or words" aria-label="Filter schedules" value=${text}
    onInput=${(event) => route.set({ text: event.target.value }, { replace: true })} />`;
  return html`<${Panel} title="By name" tools=${schedules.length > 0 && tools} inner=${false}>
    <${Table} caption="Schedules" columns=${columns()} rows=${rows} keyOf=${(each) => each.name}
      open=${(each) => route.go(link("/schedule", { name: each.name }))} empty=${schedules.length ? html`<${Empty} title="No schedule matches.">Filter by something else.<//>` : html`<${Nothing} />`} />
  <//>`;
}

function Nothing() {
  return html`<${Empty} title="There are no schedules yet.">
    Add one here, or declare it in code with <code>@app.cron("0 9 * * MON-FRI")</code>: it appears when a worker starts.
  <//>`;
}

const columns = () => [
  { label: "Schedule", class: "wide", cell: (each) => html`<${Name} schedule=${each} />` },
  { label: "When", class: "wide", cell: (each) => html`<${When} schedule=${each} />` },
  { label: "Task", cell: (each) => (each.task ? html`<${Text} value=${each.task} />` : html`<span class="quiet">–</span>`) },
  { label: "Next", class: "tight", cell: (each) => html`<${Next} schedule=${each} />` },
  { label: "Last runs", class: "tight", cell: (each) => html`<${LastRuns} key=${each.name} name=${each.name} version=${each.last_job} />` },
  ...(session.may("operate") ? [{ label: "", class: "tight", cell: (each) => html`<${ScheduleActions} schedule=${each} />` }] : []),
];

function Name({ schedule }) {
  return html`<div><${Link} to=${link("/schedule", { name: schedule.name })}><${Text} value=${schedule.name} /><//> <${Marks} schedule=${schedule} /></div>`;
}

export function Marks({ schedule }) {
  return html`${schedule.paused && html`<${Badge} kind="paused" />`} ${schedule.from_code && html`<${Badge} kind="code" title="Declared in code">from code<//>`}
    ${schedule.problem && html`<${Badge} kind="bad">can't be read<//>`}`;
}

function When({ schedule }) {
  if (schedule.problem) return html`<span class="very-late"><${Text} value=${schedule.problem} /></span>`;
  return html`<div>${schedule.explained}</div>
    ${schedule.cron && html`<div class="quiet"><code>${schedule.cron}</code> ${schedule.tz}</div>`}`;
}

function Next({ schedule }) {
  if (schedule.paused) return html`<span class="quiet">paused</span>`;
  const there = schedule.next_there && `${wallClock(schedule.next_there)} ${schedule.tz}`;
  return html`<${Ago} at=${schedule.next} elsewhere=${there} />`;
}
