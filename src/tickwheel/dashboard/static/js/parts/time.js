// Moments: local time, UTC on hover.
import { local, relative, utc } from "../format.js";
import { Source, html, useSource } from "../lib.js";

class Ticker extends Source {
  #timer = 0;
  #users = 0;
  now = Date.now();

  subscribe(listener) {
    const leave = super.subscribe(listener);
    if (this.#users++ === 0) this.#timer = setInterval(() => this.#tick(), 1000);
    return () => {
      leave();
      if (--this.#users === 0) clearInterval(this.#timer);
    };
  }

  #tick() {
    this.now = Date.now();
    if (!document.hidden) this.tell();
  }
}

export const ticker = new Ticker();

/** The time now, each second. */
export function useNow() {
  useSource(ticker);
  return ticker.now;
}

/** A moment as a local time. */
export function Time({ at, millis = false }) {
  if (!at) return html`<span class="quiet">–</span>`;
  return html`<time class="num" datetime=${at} title=${utc(at)}>${local(at, { millis })}</time>`;
}

/** A moment as its distance from now. `elsewhere`: the same moment in words of another place, for the hover. */
export function Ago({ at, elsewhere }) {
  const now = useNow();
  if (!at) return html`<span class="quiet">–</span>`;
  const title = [local(at, { millis: true }), utc(at), elsewhere].filter(Boolean).join(" · ");
  return html`<time class="num" datetime=${at} title=${title}>${relative(at, now)}</time>`;
}
