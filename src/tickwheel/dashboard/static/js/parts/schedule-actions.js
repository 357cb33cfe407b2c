// What can be done with a schedule, each step asked for first.
import { part, post, remove } from "../api.js";
import { html } from "../lib.js";
import { live } from "../live.js";
import { Link, link } from "../router.js";
import { attempt, confirm } from "./dialog.js";
import { Note, Text } from "./marks.js";

export const CODE_OWNS = "The code owns this schedule: the next worker that starts puts its definition back.";

const of = (name) => `/v1/schedules/${part(name)}`;

async function step(question, act, done) {
  if (!(await confirm(question))) return false;
  const answer = await attempt(act, done);
  if (answer !== undefined) live.refresh();
  return answer !== undefined;
}

export const pause = ({ name }) =>
  step(
    {
      title: html`Pause <${Text} value=${name} />?`,
      words: "It does not tick until it is resumed, and the ticks of that time are skipped. Jobs that it has added already still run.",
      action: "Pause",
    },
    () => post(`${of(name)}/pause`),
    html`<${Text} value=${name} /> is paused.`,
  );

export const resume = ({ name }) =>
  step(
    { title: html`Resume <${Text} value=${name} />?`, words: "It ticks again, from now on.", action: "Resume" },
    () => post(`${of(name)}/resume`),
    html`<${Text} value=${name} /> ticks again.`,
  );

export const runNow = ({ name, task }) =>
  step(
    {
      title: html`Run <${Text} value=${name} /> now?`,
      words: html`Adds one job of the task <${Text} value=${task} mono=${true} />, in addition to its ticks.`,
      action: "Run now",
    },
    () => post(`${of(name)}/run`),
    (answer) => html`Added <${Link} to=${link("/job", { id: answer.job })}><${Text} value=${answer.job} /><//>.`,
  );

export const drop = ({ name, from_code: fromCode }) =>
  step(
    {
      title: html`Delete <${Text} value=${name} />?`,
      words: html`<p>It does not tick any more. Jobs that it has added stay.</p>${fromCode && html`<${Note} level="warn">${CODE_OWNS}<//>`}`,
      action: "Delete the schedule",
      danger: true,
    },
    () => remove(of(name)),
    html`<${Text} value=${name} /> is deleted.`,
  );

/** The buttons for one schedule. One that can't be read can only be deleted. */
export function ScheduleActions({ schedule, small = true, dropped }) {
  const size = small ? "small" : "";
  const about = (verb) => `${verb} ${schedule.name}`;
  const deleteIt = async () => (await drop(schedule)) && dropped?.();
  return html`<span class="buttons">
    ${!schedule.problem &&
    html`<button class=${`button ${size}`} aria-label=${about("Run now:")} onClick=${() => runNow(schedule)}>Run now</button>
      ${schedule.paused
        ? html`<button class=${`button ${size}`} aria-label=${about("Resume")} onClick=${() => resume(schedule)}>Resume</button>`
        : html`<button class=${`button ${size}`} aria-label=${about("Pause")} onClick=${() => pause(schedule)}>Pause</button>`}`}
    <button class=${`button danger ${size}`} aria-label=${about("Delete")} onClick=${deleteIt}>Delete</button>
  </span>`;
}
