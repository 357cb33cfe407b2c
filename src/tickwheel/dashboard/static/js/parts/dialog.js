// Dialogs and messages: above everything, and untouched by what is live.
import { Source, html, useEffect, useRef, useSource, useState } from "../lib.js";

// --- Messages

class Toasts extends Source {
  #id = 0;
  shown = [];

  add(words, kind) {
    const toast = { id: ++this.#id, words, kind };
    this.shown = [...this.shown.slice(-3), toast];
    this.tell();
    setTimeout(() => this.drop(toast.id), kind === "bad" ? 12_000 : 5000);
  }

  drop(id) {
    this.shown = this.shown.filter((toast) => toast.id !== id);
    this.tell();
  }
}

const toasts = new Toasts();

export const say = (words) => toasts.add(words, "");
export const complain = (problem) => toasts.add(problem.message ?? String(problem), "bad");

export function ToastHost() {
  useSource(toasts);
  return html`<div class="toasts" role="status" aria-live="polite">
    ${toasts.shown.map(
      (toast) => html`<div key=${toast.id} class=${`toast ${toast.kind}`}>
        <span>${toast.words}</span>
        <button class="button small plain" onClick=${() => toasts.drop(toast.id)} aria-label="Dismiss">✕</button>
      </div>`,
    )}
  </div>`;
}

/** Carry out a step, and say how it went. Returns its answer, or undefined if it failed. */
export async function attempt(step, done) {
  try {
    const answer = await step();
    if (done) say(typeof done === "function" ? done(answer) : done);
    return answer ?? null;
  } catch (problem) {
    complain(problem);
    return undefined;
  }
}

// --- Dialogs

class Dialogs extends Source {
  current = null;

  open(dialog) {
    this.current = dialog;
    this.tell();
  }

  close() {
    this.current = null;
    this.tell();
  }
}

const dialogs = new Dialogs();

/** Show a dialog: `draw(close)` draws what is in it. */
export function openDialog(draw, { large = false } = {}) {
  dialogs.open({ draw, large });
}

export const closeDialog = () => dialogs.close();

/** Ask before something is done that can't be undone. `typed`: a word that has to be typed first. */
export function confirm({ title, words, action, danger = false, typed = null }) {
  return new Promise((resolve) => {
    openDialog((close) => {
      const answer = (yes) => {
        resolve(yes);
        close();
      };
      return html`<${Question} ...${{ title, words, action, danger, typed, answer }} />`;
    });
    const leave = dialogs.subscribe(() => {
      if (dialogs.current === null) {
        leave();
        resolve(false);
      }
    });
  });
}

function Question({ title, words, action, danger, typed, answer }) {
  const [text, setText] = useState("");
  const ready = typed === null || text === typed;
  const submit = (event) => {
    event.preventDefault();
    if (ready) answer(true);
  };
  return html`<form onSubmit=${submit}>
    <h2 id="dialog-title">${title}</h2>
    <div>${words}</div>
    ${typed !== null &&
    html`<label class="field"><span>Type <code>${typed}</code> to go on</span>
      <input class="input" autocomplete="off" value=${text} onInput=${(event) => setText(event.target.value)} /></label>`}
    <div class="actions">
      <button type="button" class="button" onClick=${() => answer(false)}>Keep as it is</button>
      <button class=${`button main ${danger ? "danger" : ""}`} disabled=${!ready}>${action}</button>
    </div>
  </form>`;
}

export function DialogHost() {
  useSource(dialogs);
  const element = useRef(null);
  const current = dialogs.current;
  useEffect(() => {
    if (current && !element.current.open) element.current.showModal();
    if (!current && element.current.open) element.current.close();
  }, [current]);
  // The browser says so a moment later: by then another dialog may be open.
  const closed = () => element.current.open || dialogs.close();
  return html`<dialog ref=${element} class=${current?.large ? "large" : ""} aria-labelledby="dialog-title" onClose=${closed}>
    ${current?.draw(() => dialogs.close())}
  </dialog>`;
}

export const dialogOpen = () => dialogs.current !== null;
