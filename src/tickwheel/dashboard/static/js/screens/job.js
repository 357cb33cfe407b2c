// One job: how it stands, what became of each attempt, what it was given, and what can be done.
import { part, post, remove } from "../api.js";
import { duration, percent } from "../format.js";
import { html } from "../lib.js";
import { live, useWatch } from "../live.js";
import { attempt, confirm } from "../parts/dialog.js";
import { Heading, Panel } from "../parts/heading.js";
import { Json } from "../parts/json.js";
import { Badge, CopyButton, Empty, Loading, Text, Trouble } from "../parts/marks.js";
import { Ago, Time } from "../parts/time.js";
import { Timeline } from "../parts/timeline.js";
import { Link, link, useRoute } from "../router.js";
import { useSession } from "../session.js";
import { asCurl, asPython } from "./job-copy.js";
import { viewOf } from "./jobs-columns.js";

const ENDED = ["done", "dead", "cancelled"];

export function Job() {
  const { id = "" } = useRoute().query;
  const path = id ? `/v1/jobs/${part(id)}` : null;
  const [job, problem] = useWatch(path);
  const [explained] = useWatch(path && `${path}/explain`);
  const title = html`Job <${Text} value=${id} mono />`;
  if (!id || problem?.status === 404) return html`<${Heading} title=${title} /><${Gone} id=${id} />`;
  if (problem && !job) return html`<${Heading} title=${title} /><${Trouble} problem=${problem} retry=${() => live.refresh()} />`;
  if (!job) return html`<${Heading} title=${title} /><${Loading} />`;
  return html`
    <${Heading} title=${title}>
      <${Badge} kind=${viewOf(job)} />
      <${CopyButton} text=${job.id} label="Copy id" />
      <span class="spring"></span>
      <${Actions} job=${job} />
    <//>
    <div class="grid">
      <${Panel} title="How it stands" class="two-thirds"><${Explained} explained=${explained} job=${job} /><//>
      <${Panel} title="Facts" class="third"><${Facts} job=${job} explained=${explained} /><//>
      <${Panel} title="Attempts"><${Timeline} job=${job} /><//>
      ${(job.error || job.traceback) && html`<${Panel} title="Error"><${Failure} job=${job} /><//>`}
      <${Panel} title="Arguments" class="half"><${Json} value=${job.arguments} label="Arguments" /><//>
      <${Panel} title="Result" class="half">
        ${job.state === "done" ? html`<${Json} value=${job.result} label="Result" />` : html`<span class="quiet">It has none: only a job that is done has a result.</span>`}
      <//>
      <${Panel} title="Add the same job again"><${Copies} job=${job} /><//>
    </div>`;
}

function Gone({ id }) {
  return html`<${Empty} title="There is no such job.">
    ${id ? "It was never added, was deleted, or was pruned some time after it ended. " : "The address has no id. "}<${Link} to="/jobs">Show all jobs<//>
  <//>`;
}

// --- What can be done

const STEPS = {
  cancel: {
    label: "Cancel",
    words: (job) => (job.state === "running" ? "Its worker is told to stop it, and it does not run again." : "It will not run."),
    act: (path) => post(`${path}/cancel`),
    done: ({ outcome }) => (outcome === "requested" ? "Its worker is told to stop it." : "Cancelled."),
    danger: true,
  },
  rerun: { label: "Rerun", words: () => "It is due at once, with all its retries.", act: (path) => post(`${path}/rerun`), done: () => "It is due now.", danger: false },
  delete: { label: "Delete", words: () => "It is gone for good, with its arguments, result and history.", act: remove, done: () => "Deleted.", danger: true },
};

function Actions({ job }) {
  if (!useSession().may("operate")) return html`<span class="quiet">Read-only</span>`;
  const ended = ENDED.includes(job.state);
  const names = ended ? ["rerun", "delete"] : ["cancel"];
  return names.map((name) => {
    const asked = name === "cancel" && job.cancel_requested;
    return html`<button key=${name} class=${`button ${STEPS[name].danger ? "danger" : ""}`} disabled=${asked} onClick=${() => take(STEPS[name], job)}>${asked ? "Asked to stop" : STEPS[name].label}</button>`;
  });
}

async function take(step, job) {
  const title = html`${step.label} job <${Text} value=${job.id} />?`;
  if (!(await confirm({ title, words: step.words(job), action: step.label, danger: step.danger }))) return;
  await attempt(() => step.act(`/v1/jobs/${part(job.id)}`), step.done);
  live.refresh();
}

// --- How it stands

function Explained({ explained, job }) {
  if (!explained) return html`<${Loading} />`;
  return html`<div class="explained">
    <p class="headline"><bdi>${explained.headline}</bdi></p>
    ${job.progress && job.state === "running" && html`<${Progress} progress=${job.progress} />`}
    <ul class="reasons">${explained.reasons.map((each) => html`<li key=${each.code}><bdi>${each.words}</bdi></li>`)}</ul>
    <p class="quiet">When it runs: <bdi>${explained.runs_words}</bdi>.</p>
    ${explained.advice.map((each) => html`<${Advice} key=${each.words} advice=${each} />`)}
  </div>`;
}

function Progress({ progress }) {
  return html`<div><progress aria-label="Progress" max="1" value=${progress.part}></progress>
    <span class="num">${percent(progress.part)}</span> <${Text} value=${progress.words} /></div>`;
}

function Advice({ advice }) {
  return html`<div class="advice"><bdi>${advice.words}</bdi>
    ${advice.command && html`<div class="code command"><pre tabindex="0">${advice.command}</pre><${CopyButton} text=${advice.command} class="small copy" /></div>`}
  </div>`;
}

function Failure({ job }) {
  return html`<div class="failure">
    ${job.error && html`<p class="very-late"><${Text} value=${job.error} mono /></p>`}
    ${job.traceback && html`<div class="code"><pre tabindex="0" aria-label="Traceback">${job.traceback}</pre><${CopyButton} text=${job.traceback} class="small copy" /></div>`}
  </div>`;
}

// --- Facts

function Facts({ job, explained }) {
  const meta = Object.entries(job.meta);
  const retries = job.retries ?? explained?.retries;
  const rows = [
    ["Task", html`<${Link} to=${link("/jobs", { task: job.task })}><${Text} value=${job.task} /><//>`],
    ["Queue", html`<${Link} to=${link("/jobs", { queue: job.queue })}><${Text} value=${job.queue} /><//>`],
    ["Priority", job.priority],
    ["Created", html`<${Moment} at=${job.created} />`],
    ["Due", html`<${Moment} at=${job.due} />`],
    job.ended && ["Ended", html`<${Moment} at=${job.ended} />`],
    job.expires && ["Expires", html`<${Moment} at=${job.expires} />`],
    ["Attempts", `${job.attempts}${job.takeovers ? `, ${job.takeovers} taken over` : ""}`],
    ["Failures", `${job.failures}${retries === null || retries === undefined ? "" : `, ${retries} ${retries === 1 ? "retry" : "retries"} allowed`}`],
    job.timeout_ms !== null && ["Timeout", duration(job.timeout_ms)],
    job.worker && ["Worker", html`<${Link} to=${link("/workers", { text: job.worker })}><${Text} value=${job.worker} /><//>`],
    explained?.schedule && ["Schedule", html`<${Link} to=${link("/schedule", { name: explained.schedule })}><${Text} value=${explained.schedule} /><//>`],
    meta.length > 0 && ["Meta", meta.map(([name, value]) => html`<div><${Link} to=${link("/jobs", { meta: `${name}=${value}` })}><${Text} value=${name} />=<${Text} value=${value} /><//></div>`)],
  ];
  return html`<dl class="facts">${rows.filter(Boolean).map(([label, value]) => html`<dt>${label}</dt><dd>${value}</dd>`)}</dl>`;
}

const Moment = ({ at }) => html`<${Time} at=${at} millis /> <span class="quiet"><${Ago} at=${at} /></span>`;

// --- Copies

function Copies({ job }) {
  const { document } = useSession();
  const keys = Boolean(document?.keys);
  return html`<div class="copies">
    <p class="quiet">Its id is left out, and what was redacted stays so: fill it in. The key is read from <code>TICKWHEEL_KEY</code>${!keys && ", once there are keys"}.</p>
    <details><summary>Python</summary><${Snippet} text=${asPython(job, { keys })} label="Python" /></details>
    <details><summary>curl</summary><${Snippet} text=${asCurl(job, { keys })} label="curl" /></details>
    <div class="row"><${CopyButton} text=${() => asPython(job, { keys })} label="Copy as Python" /> <${CopyButton} text=${() => asCurl(job, { keys })} label="Copy as curl" /></div>
  </div>`;
}

const Snippet = ({ text, label }) => html`<div class="code"><pre tabindex="0" aria-label=${label}>${text}</pre></div>`;
