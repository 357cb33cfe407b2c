// A search box with suggestions: arrow keys choose, Enter takes, Esc closes.
import { onKeys } from "../keyboard.js";
import { html, useEffect, useRef, useState } from "../lib.js";

/**
 * `value`: the text that is in force. `suggest(text, caret)` returns `{ from, to, options }`.
 * `known`: what it suggests from; when that changes, so do the suggestions. `onSearch(text)`: called with Enter.
 * `onFocus`: a chance to load what is suggested.
 */
export function Search({ label, placeholder, value, suggest, known, onSearch, onFocus }) {
  const [text, setText] = useState(value);
  const [offer, setOffer] = useState(null);
  const [at, setAt] = useState(-1);
  const input = useRef(null);
  // Another query is in force: by a link, or back and forward.
  useEffect(() => setText(value), [value]);
  useEffect(() => onKeys({ "/": () => { input.current.focus(); input.current.select(); } }), []);

  const looking = useRef(false);
  const look = (chosen = null) => {
    looking.current = true;
    const found = suggest(input.current.value, input.current.selectionStart);
    setOffer(found.options.length ? found : null);
    setAt(chosen === null ? -1 : found.options.indexOf(chosen));
  };
  const close = () => {
    looking.current = false;
    setOffer(null);
  };
  useEffect(() => {
    if (looking.current) look(offer?.options[at] ?? null);
  }, [known]);
  const search = (wanted) => {
    close();
    onSearch(wanted.trim());
  };
  const take = (option) => {
    const whole = !/[:<>.]$/.test(option);
    const next = text.slice(0, offer.from) + option + (whole ? " " : "") + text.slice(offer.to).trimStart();
    const caret = offer.from + option.length + (whole ? 1 : 0);
    setText(next);
    close();
    requestAnimationFrame(() => {
      input.current?.focus();
      input.current?.setSelectionRange(caret, caret);
      if (!whole) look();
    });
  };
  const pressed = (event) => {
    if (event.isComposing) return;
    const last = (offer?.options.length ?? 0) - 1;
    if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      event.preventDefault();
      if (!offer) return look();
      setAt(event.key === "ArrowDown" ? (at >= last ? 0 : at + 1) : at <= 0 ? last : at - 1);
    } else if (event.key === "Escape") {
      if (offer) close();
      else input.current.blur();
    } else if (event.key === "Enter") {
      event.preventDefault();
      if (offer && at >= 0) take(offer.options[at]);
      else search(text);
    } else if (event.key === "Tab" && offer && at >= 0) {
      event.preventDefault();
      take(offer.options[at]);
    }
  };
  return html`<form class="search" role="search" onSubmit=${(event) => { event.preventDefault(); search(text); }}>
    <input ref=${input} class="input" type="text" role="combobox" aria-label=${label} placeholder=${placeholder} autocomplete="off" autocapitalize="off" spellcheck=${false}
      aria-expanded=${offer ? "true" : "false"} aria-controls="search-options" aria-autocomplete="list" aria-activedescendant=${offer && at >= 0 ? `search-option-${at}` : undefined}
      value=${text} onInput=${(event) => { setText(event.target.value); look(); }} onKeyDown=${pressed}
      onFocus=${() => { onFocus?.(); look(); }} onClick=${() => look()} onBlur=${close} />
    <ul id="search-options" role="listbox" aria-label="Suggestions" hidden=${!offer}>
      ${offer?.options.map(
        (option, n) => html`<li id=${`search-option-${n}`} key=${option} role="option" aria-selected=${n === at ? "true" : "false"}
          onPointerDown=${(event) => { event.preventDefault(); take(option); }}><bdi class="mono">${option}</bdi></li>`,
      )}
    </ul>
    ${text !== "" && html`<button type="button" class="button plain small clear" aria-label="Clear the search" onClick=${() => { setText(""); search(""); }}>✕</button>`}
    <button class="button">Search</button>
  </form>`;
}
