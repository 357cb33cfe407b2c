// Dead jobs, grouped by what went wrong.
import { withQuery } from "../api.js";
import { count, plural } from "../format.js";
import { html } from "../lib.js";
import { live, useWatch } from "../live.js";
import { bulk, byFilter, serverNow } from "../parts/bulk.js";
import { Heading } from "../parts/heading.js";
import { CopyButton, Empty, Loading, Text, Trouble } from "../parts/marks.js";
import { Ago } from "../parts/time.js";
import { Link, link, route, useRoute } from "../router.js";
import { useSession } from "../session.js";

export function Dead() {
  const { query } = useRoute();
  const { queue, task } = query;
  const [found, problem] = useWatch(withQuery("/v1/dead/groups", { queue, task }));
  const may = useSession().may("operate");
  return html`
    <${Heading} title="Dead">
      <span class="spring"></span>
      <${Link} class="button" to=${link("/jobs", { view: "dead", queue, task })}>List all dead jobs<//>
    <//>
    <${Filter} queue=${queue} task=${task} />
    ${problem && html`<${Trouble} problem=${problem} retry=${() => live.refresh()} />`}
    ${found ? html`<${Groups} ...${{ found, queue, task, may }} />` : !problem && html`<${Loading} />`}`;
}

function Filter({ queue, task }) {
  const field = (label, name, value) => html`<label class="filter"><span>${label}</span>
    <input class="input" autocomplete="off" placeholder="any" value=${value ?? ""} onChange=${(event) => route.set({ [name]: event.target.value })} /></label>`;
  return html`<div class="filters">${field("Queue", "queue", queue)}${field("Task", "task", task)}</div>`;
}

function Groups({ found, queue, task, may }) {
  if (found.groups.length === 0) return html`<section class="panel"><${Nothing} filtered=${Boolean(queue || task)} /></section>`;
  return html`
    <p class="quiet">${plural(found.groups.length, "group")} of ${plural(found.total, "dead job")}, the largest first.
      ${found.looked < found.total && ` The newest ${count(found.looked)} were looked at.`}</p>
    <ul class="groups">${found.groups.map((group) => html`<${Group} key=${group.fingerprint} ...${{ group, queue, may }} partial=${found.looked < found.total} />`)}</ul>`;
}

function Nothing({ filtered }) {
  if (filtered) return html`<${Empty} title="Nothing that matches is dead."><${Link} to="/dead">Drop the filters<//><//>`;
  return html`<${Empty} title="Nothing is dead.">Jobs that fail after all their retries are kept here, until you rerun or delete them.<//>`;
}

function Group({ group, queue, may, partial }) {
  const { sample } = group;
  return html`<li class="panel group">
    <div class="group-head">
      <strong class="group-count num" title=${plural(group.count, "job")}>${count(group.count)}<span class="visually-hidden"> jobs</span></strong>
      <div class="group-what">
        <h2><${Text} value=${group.task} /></h2>
        <p class="very-late"><${Text} value=${group.error ?? "no error was stored"} mono /></p>
        <p class="quiet">Last <${Ago} at=${group.last} />, first <${Ago} at=${group.first} /> · ${group.queues.length === 1 ? "queue" : "queues"} ${group.queues.map(
          (name, n) => html`${n > 0 && ", "}<${Link} to=${link("/jobs", { view: "dead", queue: name, task: group.task })}><${Text} value=${name} /><//>`,
        )}</p>
      </div>
      ${may && html`<div class="group-actions" role="group" aria-label="Actions">
        <button class="button small" onClick=${() => act("rerun", group, queue, partial)}>Rerun</button>
        <button class="button small danger" onClick=${() => act("delete", group, queue, partial)}>Delete</button>
      </div>`}
    </div>
    <div>
      Sample: <${Link} to=${link("/job", { id: sample.id })}><${Text} value=${sample.id} mono /><//>
      ${sample.error && sample.error !== group.error && html` <span class="quiet"><${Text} value=${sample.error} mono /></span>`}
    </div>
    ${sample.traceback &&
    html`<details>
      <summary>Traceback</summary>
      <div class="code"><pre tabindex="0" aria-label="Traceback">${sample.traceback}</pre><${CopyButton} text=${sample.traceback} class="small copy" /></div>
    </details>`}
  </li>`;
}

async function act(action, group, queue, partial) {
  const start = await serverNow();
  const filter = { fingerprint: group.fingerprint, task: group.task, until: new Date(start).toISOString(), ...(queue ? { queue } : {}) };
  await bulk({
    action,
    total: group.count,
    // Only the newest were grouped: older ones may be like them.
    exact: !partial,
    about: html`of <${Text} value=${group.task} /> with this error`,
    more: "Jobs that die from now on are left alone.",
    typed: action === "delete" ? "delete" : null,
    batches: () => byFilter(`/v1/dead/${action}`, filter),
  });
}
