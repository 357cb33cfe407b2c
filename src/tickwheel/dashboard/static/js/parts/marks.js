// Small things that say how something stands.
import { duration } from "../format.js";
import { html, useState } from "../lib.js";

/** A state, a view, an outcome or a level, in its colour. */
export function Badge({ kind, children, title }) {
  return html`<span class=${`badge ${kind}`} title=${title}>${children ?? kind}</span>`;
}

/** How late something started. */
export function Lateness({ ms }) {
  if (ms === null || ms === undefined) return html`<span class="quiet">–</span>`;
  const mark = ms > 60_000 ? "very-late" : ms > 1000 ? "late" : "";
  return html`<span class=${`num ${mark}`}>${duration(ms)}</span>`;
}

/** Somebody's own text, whatever it contains, in its own direction and nobody else's. */
export function Text({ value, mono = false, cut = false }) {
  return html`<bdi class=${`${mono ? "mono" : ""} ${cut ? "cut" : ""}`} title=${cut ? value : undefined}>${value}</bdi>`;
}

export function Empty({ title, children }) {
  return html`<div class="empty"><strong>${title}</strong>${children}</div>`;
}

export function Loading() {
  return html`<div class="loading" role="status">Loading…</div>`;
}

/** What went wrong, and a way to try again. */
export function Trouble({ problem, retry }) {
  return html`<div class="note bad" role="alert">
    <div><strong>${problem.title || "Something went wrong"}</strong><div>${problem.message}</div></div>
    ${retry && html`<button class="button small" onClick=${retry}>Try again</button>`}
  </div>`;
}

/** Why a part of a screen has nothing to show. */
export function Unseen({ problem, retry }) {
  return problem.status === 403 ? html`<${Empty} title="Your key does not see this." />` : html`<${Trouble} problem=${problem} retry=${retry} />`;
}

export function Note({ level = "", children }) {
  return html`<div class=${`note ${level}`}><div>${children}</div></div>`;
}

/** Copy a text. Pages without TLS have no clipboard: they select and ask the browser. */
export async function copy(text) {
  if (navigator.clipboard && isSecureContext) return navigator.clipboard.writeText(text);
  const area = document.createElement("textarea");
  area.value = text;
  area.className = "visually-hidden";
  (document.querySelector("dialog[open]") ?? document.body).append(area);
  area.select();
  try {
    if (!document.execCommand("copy")) throw new Error("the browser does not allow it");
  } finally {
    area.remove();
  }
}

export function CopyButton({ text, label = "Copy", class: more = "small" }) {
  const [said, say] = useState(null);
  const act = async () => {
    try {
      await copy(typeof text === "function" ? text() : text);
      say("Copied");
    } catch {
      say("Can't copy");
    }
    setTimeout(() => say(null), 1500);
  };
  return html`<button type="button" class=${`button ${more}`} onClick=${act} aria-live="polite">${said ?? label}</button>`;
}
