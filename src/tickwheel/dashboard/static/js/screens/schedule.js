// One schedule: when it ticks, and how it went.
import { part, withQuery } from "../api.js";
import { duration, local, relative, utc, wallClock, zone } from "../format.js";
import { html } from "../lib.js";
import { live, useWatch } from "../live.js";
import { Heading, Panel } from "../parts/heading.js";
import { Json } from "../parts/json.js";
import { Badge, Empty, Lateness, Loading, Note, Text, Trouble } from "../parts/marks.js";
import { ScheduleActions } from "../parts/schedule-actions.js";
import { editSchedule } from "../parts/schedule-form.js";
import { Strip, runsPath, stateWords } from "../parts/strip.js";
import { Table } from "../parts/table.js";
import { Ago, Time, useNow } from "../parts/time.js";
import { useRead } from "../read.js";
import { Link, link, route, useRoute } from "../router.js";
import { session } from "../session.js";
import { Marks } from "./schedules.js";

const RUNS = 20;
const TICKS = 10;
const AGAIN_MS = 5000;

export function Schedule() {
  const { name = "" } = useRoute().query;
  const [schedule, problem] = useWatch(name ? `/v1/schedules/${part(name)}` : null);
  const back = html`<${Link} to="/schedules">All schedules<//>`;
  if (!name || problem?.status === 404) {
    return html`<${Heading} title="Schedule" /><${Empty} title=${html`There is no schedule <${Text} value=${name || "without a name"} />.`}>${back}<//>`;
  }
  const title = html`<${Text} value=${name} />`;
  if (!schedule) return html`<${Heading} title=${title} />${problem ? html`<${Trouble} problem=${problem} retry=${() => live.refresh()} />` : html`<${Loading} />`}`;
  const dropped = () => route.go("/schedules");
  return html`
    <${Heading} title=${title}>
      <${Marks} schedule=${schedule} />
      <span class="spring"></span>
      ${session.may("operate") &&
      html`${!schedule.problem && html`<button class="button" onClick=${() => editSchedule(schedule)}>Edit</button>`}
        <${ScheduleActions} schedule=${schedule} small=${false} dropped=${dropped} />`}
    <//>
    ${schedule.problem
      ? html`<${Note} level="bad"><strong>Its rule can't be read, so it does not tick.</strong><div><${Text} value=${schedule.problem} /></div><//>`
      : html`<div class="grid">
          <${Panel} title="Rule" class="half"><${Rule} schedule=${schedule} /><//>
          <${Panel} title="Next ticks" class="half" inner=${false}><${NextTicks} schedule=${schedule} /><//>
        </div>`}
    <${Runs} schedule=${schedule} />`;
}

// --- The rule

const MISFIRE = { one: "the latest one runs", skip: "none of them runs", all: "all of them run" };
const OVERLAP = { allow: "the new job runs as well", skip: "the new tick is skipped", cancel: "the old job is cancelled" };

function Rule({ schedule }) {
  const facts = [
    ["Task", html`<${Link} to=${link("/jobs", { task: schedule.task })}><${Text} value=${schedule.task} /><//>`],
    ["Queue", schedule.queue && html`<${Text} value=${schedule.queue} />`],
    ["Expression", schedule.cron ? html`<code>${schedule.cron}</code>` : `every ${duration(schedule.every_ms)}`],
    ["Time zone", schedule.tz],
    ["Next tick", schedule.paused ? "none while it is paused" : html`<${Ago} at=${schedule.next} />`],
    ["Missed ticks", MISFIRE[schedule.misfire] + (schedule.misfire === "all" && schedule.misfire_limit ? `, ${schedule.misfire_limit} at most` : "")],
    ["If one still runs", OVERLAP[schedule.overlap]],
    ["Spread", schedule.spread_ms ? `within ${duration(schedule.spread_ms)} after the tick` : null],
    ["Starts", schedule.start && html`<${Time} at=${schedule.start} />`],
    ["Ends", schedule.end && html`<${Time} at=${schedule.end} />`],
    ["Declared by", schedule.from_code ? html`code${schedule.app && html` of <${Text} value=${schedule.app} />`}` : null],
  ].filter(([, value]) => value);
  return html`<p class="rule-words">${schedule.explained}</p>
    <dl class="facts">${facts.map(([label, value]) => html`<dt>${label}</dt><dd>${value}</dd>`)}</dl>
    ${Object.keys(schedule.arguments ?? {}).length > 0 && html`<h3 class="rule-arguments">Arguments</h3><${Json} value=${schedule.arguments} label="Arguments" />`}`;
}

// --- Next ticks

function NextTicks({ schedule }) {
  const now = useNow();
  const path = withQuery(`/v1/schedules/${part(schedule.name)}/next`, { count: TICKS });
  const version = JSON.stringify([schedule.next, schedule.explained, schedule.tz, schedule.start, schedule.end]);
  const { document, problem, reload } = useRead(path, { version });
  if (problem && !document) return html`<${Trouble} problem=${problem} retry=${reload} />`;
  if (!document) return html`<${Loading} />`;
  const elsewhere = document.tz !== zone();
  const columns = [
    { label: document.tz, cell: (tick) => html`<span class="num">${wallClock(tick.there)}</span>${tick.change && html`<div class="late">${tick.change}</div>`}` },
    ...(elsewhere ? [{ label: "Your time", class: "tight", cell: (tick) => html`<span class="num" title=${utc(tick.at)}>${local(tick.at)}</span>` }] : []),
    { label: "In", class: "tight", cell: (tick) => html`<span class="num quiet">${relative(tick.at, now)}</span>` },
  ];
  return html`<div class=${schedule.paused ? "faded" : ""}>
    ${schedule.paused && html`<p class="aside">As its rule says; it is paused.</p>`}
    <${Table} caption="Next ticks" columns=${columns} rows=${document.ticks.filter((tick) => Date.parse(tick.at) > now - 1000)} keyOf=${(tick) => tick.at}
      empty=${html`<${Empty} title="It never ticks again." />`} />
  </div>`;
}

// --- Last runs

const RUN_COLUMNS = [
  { label: "Tick", class: "tight", cell: (run) => html`<${Time} at=${run.tick} />` },
  { label: "State", class: "tight", cell: (run) => (run.state === null ? html`<span class="quiet">${stateWords(run)}</span>` : html`<${Badge} kind=${run.state} />`) },
  { label: "Job", class: "wide", cell: (run) => (run.state === null ? html`<${Text} value=${run.id} cut=${true} />` : html`<${Link} to=${link("/job", { id: run.id })}><${Text} value=${run.id} cut=${true} /><//>`) },
  { label: "Late by", class: "right", cell: (run) => html`<${Lateness} ms=${run.lateness_ms} />` },
  { label: "Took", class: "right", cell: (run) => (run.started && run.ended ? duration(Date.parse(run.ended) - Date.parse(run.started)) : html`<span class="quiet">–</span>`) },
  { label: "Error", class: "wide", cell: (run) => run.error && html`<${Text} value=${run.error} cut=${true} />` },
];

function Runs({ schedule }) {
  const { document, problem, reload } = useRead(runsPath(schedule.name, RUNS), { version: `${schedule.last_job} ${schedule.next}`, every: AGAIN_MS });
  const runs = document?.runs;
  return html`<${Panel} title=${`Last ${RUNS} ticks`} inner=${false} tools=${runs?.length > 0 && html`<${Strip} runs=${runs} links=${true} />`}>
    ${runs
      ? html`<${Table} caption="Last runs" columns=${RUN_COLUMNS} rows=${runs} keyOf=${(run) => run.tick} open=${(run) => run.state && route.go(link("/job", { id: run.id }))}
          empty=${html`<${Empty} title="It has not ticked yet.">Run it now to try it.<//>`} />`
      : problem
        ? html`<${Trouble} problem=${problem} retry=${reload} />`
        : html`<${Loading} />`}
  <//>`;
}
