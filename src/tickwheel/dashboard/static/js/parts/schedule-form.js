// Add or edit a schedule: with a preview of when it ticks while it is typed.
import { decode, get, part, put, withQuery } from "../api.js";
import { durationText, local, wallClock, zone } from "../format.js";
import { html, useEffect, useRef, useState } from "../lib.js";
import { live } from "../live.js";
import { useRead, useSettled } from "../read.js";
import { openDialog, say } from "./dialog.js";
import { text as jsonText } from "./json.js";
import { Note, Text } from "./marks.js";
import { CODE_OWNS } from "./schedule-actions.js";

const MISFIRE = {
  one: "run the latest one",
  skip: "run none of them",
  all: "run them all",
};
const OVERLAP = {
  allow: "run the new job as well",
  skip: "skip the new tick",
  cancel: "cancel the old job",
};
// Where to look for the wrong one of cron and zone.
const ABOUT_ZONE = /time zone|\bzone\b/i;

export const addSchedule = (known) => openDialog((close) => html`<${ScheduleForm} known=${known} close=${close} />`, { large: true });

export const editSchedule = (schedule) => openDialog((close) => html`<${ScheduleForm} schedule=${schedule} close=${close} />`, { large: true });

// --- From a schedule to what is in the fields, and back

const EMPTY = {
  name: "", task: "", kind: "cron", cron: "", every: "", tz: "", arguments: "{}",
  misfire: "one", misfireLimit: "100", overlap: "allow", spread: "", start: "", end: "",
};

function fieldsOf(schedule) {
  if (!schedule) return { ...EMPTY, tz: zone() };
  return {
    name: schedule.name,
    task: schedule.task,
    kind: schedule.cron ? "cron" : "every",
    cron: schedule.cron ?? "",
    every: durationText(schedule.every_ms),
    // The expression may name its zone: twice would be once too often.
    tz: schedule.cron?.startsWith("CRON_TZ=") ? "" : schedule.tz,
    arguments: schedule.arguments_hidden ? "" : jsonText(schedule.arguments ?? {}),
    misfire: schedule.misfire,
    misfireLimit: String(schedule.misfire_limit ?? 100),
    overlap: schedule.overlap,
    spread: durationText(schedule.spread_ms),
    start: localInput(schedule.start),
    end: localInput(schedule.end),
  };
}

/** A moment as a field for date and time holds it: local, to the second. */
function localInput(at) {
  if (!at) return "";
  const date = new Date(at);
  return new Date(date.getTime() - date.getTimezoneOffset() * 60_000).toISOString().slice(0, 19);
}

/** What the field says as a moment. Untouched, it is what it was, to the millisecond. */
function moment(field, before) {
  if (!field) return null;
  if (before && field === localInput(before)) return before;
  return new Date(field).toISOString();
}

const whenOf = (fields) => (fields.kind === "cron" ? { cron: fields.cron.trim() } : { every: fields.every.trim() });

function documentOf(fields, schedule) {
  return {
    task: fields.task.trim(),
    ...whenOf(fields),
    tz: fields.tz.trim() || null,
    arguments: readArguments(fields.arguments),
    misfire: fields.misfire,
    misfire_limit: Number(fields.misfireLimit) || 100,
    overlap: fields.overlap,
    spread: fields.spread.trim() || 0,
    start: moment(fields.start, schedule?.start),
    end: moment(fields.end, schedule?.end),
  };
}

function readArguments(text) {
  if (text.trim() === "") return {};
  const value = decode(text);
  if (value === null || typeof value !== "object" || Array.isArray(value)) throw new Error('must be an object, such as {"region": "eu"}');
  return value;
}

function argumentsProblem(text) {
  try {
    readArguments(text);
    return null;
  } catch (error) {
    return error.message;
  }
}

// --- The dialog

function ScheduleForm({ schedule, known = [], close }) {
  const [fields, setFields] = useState(() => fieldsOf(schedule));
  const [problem, setProblem] = useState(null);
  const [busy, setBusy] = useState(false);
  const tasks = useTasks();
  const set = (name) => (event) => setFields((before) => ({ ...before, [name]: event.target.value }));
  const taken = !schedule && known.includes(fields.name.trim());
  const wrong = argumentsProblem(fields.arguments);
  const preview = usePreview(fields, schedule);
  const parameters = tasks.find((each) => each.name === fields.task.trim())?.parameters;

  const submit = async (event) => {
    event.preventDefault();
    if (taken || wrong || busy) return;
    setBusy(true);
    setProblem(null);
    try {
      const name = fields.name.trim();
      await put(`/v1/schedules/${part(name)}`, documentOf(fields, schedule));
      say(html`<${Text} value=${name} /> is ${schedule ? "saved" : "added"}.`);
      live.refresh();
      close();
    } catch (found) {
      setProblem(found);
      setBusy(false);
    }
  };

  return html`<form onSubmit=${submit} class="schedule-form">
    <h2 id="dialog-title">${schedule ? html`Edit <${Text} value=${schedule.name} />` : "Add a schedule"}</h2>
    ${schedule?.from_code && html`<${Note} level="warn">${CODE_OWNS}<//>`}
    <div class="pair">
      ${!schedule && html`<${Field} label="Name" problem=${taken && "A schedule has this name: edit that one, or take another name."}>
        <input class="input" required maxlength="200" autocomplete="off" value=${fields.name} onInput=${set("name")} /><//>`}
      <${Field} label="Task" hint=${parameters && (parameters.length ? `Parameters: ${parameters.join(", ")}` : "It takes no arguments.")}>
        <input class="input" required list="form-tasks" autocomplete="off" value=${fields.task} onInput=${set("task")} /><//>
    </div>
    <datalist id="form-tasks">${tasks.map((each) => html`<option key=${each.name} value=${each.name} />`)}</datalist>
    <${When} fields=${fields} setFields=${setFields} set=${set} preview=${preview} />
    <${Preview} preview=${preview} />
    <${Field} label="Arguments, as JSON by parameter name" problem=${wrong}
      hint=${schedule?.arguments_hidden && "Some of its arguments are hidden from you: what you write here replaces all of them."}>
      <textarea class="input" spellcheck=${false} rows="3" value=${fields.arguments} onInput=${set("arguments")}></textarea><//>
    <${More} fields=${fields} set=${set} open=${Boolean(schedule)} />
    ${problem && html`<p class="problem" role="alert">${problem.message}</p>`}
    <div class="actions">
      <button type="button" class="button" onClick=${close}>Cancel</button>
      <button class="button main" disabled=${busy || taken || Boolean(wrong)}>${schedule ? "Save" : "Add schedule"}</button>
    </div>
  </form>`;
}

/** A field with its label; what is wrong with it stands below it. */
function Field({ label, hint, problem, children }) {
  return html`<label class="field"><span>${label}</span>${children}
    ${problem ? html`<small class="problem" role="alert">${problem}</small>` : hint ? html`<small>${hint}</small>` : null}
  </label>`;
}

function When({ fields, setFields, set, preview }) {
  const cron = fields.kind === "cron";
  const choose = (kind) => () => setFields((before) => ({ ...before, kind }));
  const aboutZone = preview.problem && ABOUT_ZONE.test(preview.problem);
  return html`<div class="pair">
      <div class="field">
        <span class="ranges" role="group" aria-label="How it is said when">
          <button type="button" class="button small" aria-pressed=${cron} onClick=${choose("cron")}>Cron</button>
          <button type="button" class="button small" aria-pressed=${!cron} onClick=${choose("every")}>Every</button>
        </span>
        <label class="field">
          <span class="visually-hidden">${cron ? "Cron expression" : "Interval"}</span>
          ${cron
            ? html`<input key="cron" class="input mono" required placeholder="0 9 * * MON-FRI" maxlength="256" autocomplete="off" spellcheck=${false} value=${fields.cron} onInput=${set("cron")} />`
            : html`<input key="every" class="input mono" required placeholder="15m, 1h30m, 36h" maxlength="100" autocomplete="off" spellcheck=${false} value=${fields.every} onInput=${set("every")} />`}
          ${preview.problem && !aboutZone
            ? html`<small class="problem" role="alert">${preview.problem}</small>`
            : html`<small>${cron ? "minute, hour, day, month, weekday; or six fields with seconds first" : "from the start on, or from midnight UTC"}</small>`}
        </label>
      </div>
      <${Field} label="Time zone" problem=${aboutZone && preview.problem} hint=${cron ? "Whose clock the expression means; empty: UTC" : "In which its ticks are shown; empty: UTC"}>
        <input class="input" list="form-zones" autocomplete="off" spellcheck=${false} value=${fields.tz} onInput=${set("tz")} /><//>
    </div>
    <datalist id="form-zones">${zones().map((name) => html`<option key=${name} value=${name} />`)}</datalist>`;
}

let allZones = null;
const zones = () => (allZones ??= ["UTC", ...(Intl.supportedValuesOf?.("timeZone") ?? [])]);

function Preview({ preview }) {
  if (!preview.document) return html`<div class="preview quiet" aria-live="polite">${preview.asked ? "" : "When it ticks is shown here as you type."}</div>`;
  const { explained, ticks, tz } = preview.document;
  const here = zone();
  return html`<div class="preview" aria-live="polite">
    <strong>${explained}</strong>
    <table class="ticks"><caption class="visually-hidden">Next ticks</caption>
      <thead><tr><th scope="col">${tz}</th>${tz !== here && html`<th scope="col">Your time</th>`}</tr></thead>
      <tbody>${ticks.map((tick) => html`<tr key=${tick.at}><td class="num">${wallClock(tick.there)}${tick.change && html` <span class="badge warn" title=${tick.change}>clock change</span>`}</td>
        ${tz !== here && html`<td class="num">${local(tick.at)}</td>`}</tr>`)}</tbody>
    </table>
    ${ticks.length === 0 && html`<span class="late">It never ticks again.</span>`}
  </div>`;
}

function More({ fields, set, open }) {
  const options = (choices) => Object.entries(choices).map(([value, words]) => html`<option value=${value}>${words}</option>`);
  return html`<details open=${open}>
    <summary>More: missed and overlapping ticks, spread, start and end</summary>
    <div class="pair">
      <${Field} label="Ticks that were missed while no worker ran">
        <select class="input" value=${fields.misfire} onChange=${set("misfire")}>${options(MISFIRE)}</select><//>
      ${fields.misfire === "all" &&
      html`<${Field} label="At most so many of them"><input class="input" type="number" min="1" max="10000" required value=${fields.misfireLimit} onInput=${set("misfireLimit")} /><//>`}
      <${Field} label="If the job of the tick before has not ended">
        <select class="input" value=${fields.overlap} onChange=${set("overlap")}>${options(OVERLAP)}</select><//>
      <${Field} label="Spread" hint="Each job is due at a random moment within this time after its tick, such as 30s.">
        <input class="input" autocomplete="off" value=${fields.spread} onInput=${set("spread")} /><//>
      <${Field} label=${`Start (your time, ${zone()})`}><input class="input" type="datetime-local" step="1" value=${fields.start} onInput=${set("start")} /><//>
      <${Field} label=${`End (your time, ${zone()})`}><input class="input" type="datetime-local" step="1" value=${fields.end} onInput=${set("end")} /><//>
    </div>
  </details>`;
}

// --- What the fields are helped with

/** The tasks that the server's app or any running worker knows. */
function useTasks() {
  const [tasks, setTasks] = useState([]);
  useEffect(() => {
    // Suggestions only: without them, names are typed.
    const quietly = (path) => get(path).catch(() => ({}));
    Promise.all([quietly("/v1/tasks"), quietly("/v1/workers")]).then(([own, running]) => {
      const found = new Map();
      for (const worker of running.workers ?? []) for (const name of worker.tasks ?? []) found.set(name, { name });
      for (const task of own.tasks ?? []) found.set(task.name, task);
      setTasks([...found.values()].toSorted((a, b) => a.name.localeCompare(b.name)));
    });
  }, []);
  return tasks;
}

/** The answer for what is typed, or what is wrong with it. */
function usePreview(fields, schedule) {
  const when = whenOf(fields);
  const said = Object.values(when)[0];
  const query = { ...when, tz: fields.tz.trim(), count: 5, start: moment(fields.start, schedule?.start), end: moment(fields.end, schedule?.end) };
  const path = useSettled(said ? withQuery("/v1/preview", query) : null);
  const { document, problem } = useRead(path);
  // While the next answer is on its way, the last one stays: nothing jumps.
  const last = useRef(undefined);
  if (document || problem || !path) last.current = problem ? undefined : document;
  return { asked: path !== null, document: last.current, problem: problem?.message ?? null };
}
