// The wheel, drawn: a ring of the coming hour or day, slot by slot, that turns as time passes.
import { withQuery } from "../api.js";
import { compact, count, local, plural } from "../format.js";
import { html, useEffect, useMemo, useState } from "../lib.js";
import { live, useWatch } from "../live.js";
import { Link, link, route } from "../router.js";
import { Loading, Unseen } from "./marks.js";
import { useNow } from "./time.js";

const SPANS = {
  hour: { label: "60 minutes", ms: 3_600_000, slots: 60, marks: ["now", "15", "30", "45"] },
  day: { label: "24 hours", ms: 86_400_000, slots: 96, marks: ["now", "6 h", "12 h", "18 h"] },
};
const SIZE = 320;
const INNER = 78;
const OUTER = 146;
// A hot spot has this many times the usual load, and at least this share of the largest.
const HOT = 4;
const HOT_SHARE = 0.5;

export function Wheel() {
  const [span, setSpan] = useState("hour");
  const [pointed, setPointed] = useState(null);
  const now = useNow();
  const { ms, slots, marks } = SPANS[span];
  const width = ms / slots;
  // Whole slots: a new question each time one has passed, and the ring turns in between.
  const from = Math.floor(now / width) * width;
  const path = withQuery("/v1/due", { from: new Date(from).toISOString(), until: new Date(from + ms).toISOString(), slots });
  const [latest, problem] = useWatch(path);
  const [due, setDue] = useState(null);
  useEffect(() => latest && setDue({ ...latest, start: from }), [latest]);
  const usable = due && due.counts.length === slots ? due : null;
  const ring = useMemo(() => usable && slotsOf(usable.counts), [usable]);
  if (problem && !usable) return html`<${Unseen} problem=${problem} retry=${() => live.refresh()} />`;

  return html`<div class="wheel">
    <div class="ranges" role="group" aria-label="How far ahead">
      ${Object.entries(SPANS).map(
        ([name, each]) => html`<button class="button small" aria-pressed=${name === span} onClick=${() => setSpan(name)}>${each.label}</button>`,
      )}
    </div>
    ${usable ? html`<${Ring} ...${{ due: usable, ring, now, width, marks, pointed, setPointed }} />` : html`<${Loading} />`}
    ${usable && html`<${Words} due=${usable} ring=${ring} width=${width} pointed=${pointed} />`}
  </div>`;
}

/** Each slot with its height from 0 to 1, and whether it is hot. */
export function slotsOf(counts) {
  const most = Math.max(...counts, 1);
  const busy = counts.filter((each) => each > 0);
  const usual = busy.length ? busy.toSorted((a, b) => a - b)[busy.length >> 1] : 0;
  return counts.map((jobs) => ({
    jobs,
    // The square root: a few jobs still show beside many.
    height: jobs === 0 ? 0 : Math.max(Math.sqrt(jobs / most), 0.06),
    hot: jobs >= 10 && jobs > usual * HOT && jobs >= most * HOT_SHARE,
  }));
}

function Ring({ due, ring, now, width, marks, pointed, setPointed }) {
  // Noon is now: each slot moves towards it until it is due.
  const turned = -((now - due.start) / (width * ring.length)) * 360;
  const open = (n) => route.go(jobsOf(due, n, width));
  return html`<svg viewBox=${`${-SIZE / 2} ${-SIZE / 2} ${SIZE} ${SIZE}`} role="group" aria-label=${`${plural(total(ring), "job")} fall due, by time`}>
    <circle r=${INNER - 5} class="wheel-track" />
    <circle r=${OUTER + 2} class="wheel-track" />
    <g key=${due.start} class="wheel-slots" style=${{ transform: `rotate(${turned.toFixed(3)}deg)` }}>
      ${ring.map((slot, n) => {
        const label = `${plural(slot.jobs, "job")} due from ${local(due.start + n * width)}`;
        return html`<a key=${n} href=${jobsOf(due, n, width).slice(1)} tabindex=${slot.jobs ? 0 : -1} aria-label=${label} aria-hidden=${slot.jobs ? undefined : "true"}
            class=${`wheel-slot ${slot.hot ? "hot" : ""} ${pointed === n ? "pointed" : ""}`}
            onPointerEnter=${() => setPointed(n)} onPointerLeave=${() => setPointed(null)} onFocus=${() => setPointed(n)} onBlur=${() => setPointed(null)}
            onClick=${(event) => { event.preventDefault(); open(n); }}>
          <path class="hit" d=${wedge(n, ring.length, INNER, OUTER)} />
          <path class="fill" d=${wedge(n, ring.length, INNER, INNER + (OUTER - INNER) * slot.height)} />
        </a>`;
      })}
    </g>
    <path class="wheel-hand" d=${`M0 ${-OUTER - 6} l-5 -9 h10 z`} />
    ${marks.slice(1).map((mark, n) => {
      const angle = ((n + 1) / 4) * 2 * Math.PI;
      return html`<text class="wheel-mark" x=${Math.sin(angle) * (INNER - 20)} y=${-Math.cos(angle) * (INNER - 20) + 4}>${mark}</text>`;
    })}
    <text class="wheel-total" y="2">${compact(total(ring))}</text>
    <text class="wheel-unit" y="20">due</text>
  </svg>`;
}

function Words({ due, ring, width, pointed }) {
  if (pointed !== null && ring[pointed]) {
    const from = due.start + pointed * width;
    return html`<p class="wheel-words"><b>${plural(ring[pointed].jobs, "job")}</b> from ${local(from)} to ${local(from + width)}</p>`;
  }
  const hot = ring.map((slot, n) => [slot, n]).filter(([slot]) => slot.hot);
  const parts = [];
  if (due.overdue) parts.push(html`<${Link} to="/jobs?view=ready">${count(due.overdue)} due already<//>`);
  if (due.later) parts.push(html`${count(due.later)} later`);
  if (hot.length) {
    const [slot, n] = hot.reduce((most, each) => (each[0].jobs > most[0].jobs ? each : most));
    parts.push(html`<${Link} to=${jobsOf(due, n, width)}>hot spot: ${count(slot.jobs)} at ${local(due.start + n * width)}<//>`);
  }
  if (!due.exact) parts.push(`from a sample of ${count(due.looked)}`);
  return html`<p class="wheel-words quiet">${parts.length ? parts.map((part, n) => html`${n > 0 && " · "}${part}`) : "Nothing else is waiting."}</p>`;
}

const total = (ring) => ring.reduce((sum, slot) => sum + slot.jobs, 0);

function jobsOf(due, n, width) {
  const from = due.start + n * width;
  return link("/jobs", { view: "scheduled", from: new Date(from).toISOString(), until: new Date(from + width).toISOString() });
}

function wedge(n, slots, inner, outer) {
  const gap = 0.12 / slots;
  const start = (n / slots + gap) * 2 * Math.PI;
  const end = ((n + 1) / slots - gap) * 2 * Math.PI;
  const at = (angle, radius) => `${(Math.sin(angle) * radius).toFixed(2)} ${(-Math.cos(angle) * radius).toFixed(2)}`;
  return `M${at(start, inner)} L${at(start, outer)} A${outer} ${outer} 0 0 1 ${at(end, outer)} L${at(end, inner)} A${inner} ${inner} 0 0 0 ${at(start, inner)} Z`;
}
