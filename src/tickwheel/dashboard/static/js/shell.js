// The frame around every screen: where one can go, how things stand, who is there.
import { address } from "./api.js";
import { compact } from "./format.js";
import { onKeys } from "./keyboard.js";
import { html, store, stored, useEffect, useSource, useState } from "./lib.js";
import { INTERVALS, live, useWatch } from "./live.js";
import { attempt, openDialog } from "./parts/dialog.js";
import { Menu } from "./parts/menu.js";
import { useNow } from "./parts/time.js";
import { Link, route, useRoute } from "./router.js";
import { session, useSession } from "./session.js";

export const PLACES = [
  { path: "/", label: "Overview", key: "o" },
  { path: "/jobs", label: "Jobs", key: "j" },
  { path: "/dead", label: "Dead", key: "d" },
  { path: "/schedules", label: "Schedules", key: "s" },
  { path: "/queues", label: "Queues", key: "q" },
  { path: "/workers", label: "Workers", key: "w" },
  { path: "/store", label: "Store", key: "t" },
  { path: "/audit", label: "Audit", key: "a" },
];
// A screen of one thing belongs to the list of them.
const PARENTS = { "/job": "/jobs", "/schedule": "/schedules" };

export function Shell({ children }) {
  useEffect(() => {
    const keys = { "?": showHelp, t: nextTheme, r: () => live.refresh() };
    for (const place of PLACES) keys[`g ${place.key}`] = () => route.go(place.path);
    return onKeys(keys);
  }, []);
  return html`<div class="frame">
    <a class="skip" href="#main" onClick=${(event) => { event.preventDefault(); document.getElementById("main").focus(); }}>Skip to the content</a>
    <${Side} />
    <div>
      <${Top} />
      <main id="main" tabindex="-1">${children}</main>
    </div>
  </div>`;
}

function Side() {
  const { path } = useRoute();
  const { document } = useSession();
  const [overview] = useWatch("/v1/overview");
  const here = PARENTS[path] ?? path;
  const stats = overview?.stats;
  const tails = stats
    ? {
        "/jobs": [stats.waiting === null ? "" : compact(stats.waiting + stats.running), ""],
        "/dead": [stats.dead ? compact(stats.dead) : "", stats.dead ? "bad" : ""],
        "/workers": [compact(stats.workers), stats.workers === 0 && stats.waiting > 0 ? "bad" : ""],
        "/queues": [stats.paused_queues ? `${stats.paused_queues} paused` : "", ""],
      }
    : {};
  return html`<div class="side">
    <${Link} class="brand" to="/"><img src=${logo()} alt="" />Tickwheel<//>
    <nav aria-label="Screens"><ul>
      ${PLACES.map((place) => {
        const [text, kind] = tails[place.path] ?? ["", ""];
        return html`<li><${Link} to=${place.path} aria-current=${here === place.path ? "page" : undefined}>
          ${place.label}${text && html`<span class=${`tail ${kind}`}>${text}</span>`}
        <//></li>`;
      })}
    </ul></nav>
    <footer>
      <span>${document.app ? html`<bdi>${document.app}</bdi> on ` : ""}${document.store}</span>
      <span>Tickwheel ${document.version} · <a href=${address("/v1/openapi.json")}>API</a></span>
    </footer>
  </div>`;
}

export const logo = () => new URL("../favicon.svg", import.meta.url).href;

function Top() {
  const { document } = useSession();
  return html`<header class="top">
    <${Environment} environment=${document.environment} />
    <span class="spring"></span>
    <${LiveMenu} />
    <${ThemeMenu} />
    <button class="button small plain" onClick=${showHelp} aria-label="Keyboard shortcuts" title="Keyboard shortcuts">?</button>
    <${Who} />
  </header>`;
}

export function Environment({ environment }) {
  if (!environment) return null;
  const style = environment.colour ? { "--badge": environment.colour } : {};
  return html`<span class="environment" style=${style} title="Environment"><bdi>${environment.name}</bdi></span>`;
}

function Who() {
  const { document } = useSession();
  if (!document.keys) return html`<span class="quiet" title="There are no API keys: only this machine has access.">No sign-in</span>`;
  const readOnly = !session.may("operate");
  return html`<${Menu} class="small" label=${html`<bdi class="cut who">${document.who}</bdi>${readOnly && " · read-only"}`} title="Signed in">
    <span class="title">Scopes: ${document.scopes.join(", ")}</span>
    <button onClick=${() => attempt(() => session.signOut())}>Sign out</button>
  <//>`;
}

// --- Live

const WORDS = { live: "Live", connecting: "Connecting…", refused: "Not live", hidden: "Paused", off: "Off" };

function LiveMenu() {
  useSource(live);
  const now = useNow();
  const { status, every, heardAt } = live;
  const since = heardAt === null ? null : Math.max(0, Math.round((now - heardAt) / 1000));
  const stale = status === "connecting" && since !== null;
  const words = stale ? `Last heard ${since} s ago` : WORDS[status];
  const label = html`<span class=${`dot ${status}`}></span><span>${words}</span>`;
  return html`<${Menu} class="small" label=${label} title="Live updates">
    <span class="title">${since === null ? "Nothing heard yet" : `Last heard ${since} s ago`}</span>
    ${[...INTERVALS, 0].map(
      (each) => html`<button aria-pressed=${each === every} onClick=${() => live.setInterval(each)}>
        ${each === every ? "✓ " : ""}${each === 0 ? "Off" : `Every ${each} s`}
      </button>`,
    )}
    <button onClick=${() => live.refresh()}>Refresh now</button>
  <//>`;
}

// --- Themes

const THEMES = ["system", "light", "dark"];

function applyTheme(theme) {
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  store("theme", theme === "system" ? null : theme);
  dispatchEvent(new Event("tickwheel-theme"));
}

const nextTheme = () => applyTheme(THEMES[(THEMES.indexOf(stored("theme", "system")) + 1) % THEMES.length]);

function ThemeMenu() {
  const [theme, setTheme] = useState(stored("theme", "system"));
  useEffect(() => {
    const read = () => setTheme(document.documentElement.dataset.theme ?? "system");
    addEventListener("tickwheel-theme", read);
    return () => removeEventListener("tickwheel-theme", read);
  }, []);
  const title = { system: "System", light: "Light", dark: "Dark" };
  return html`<${Menu} class="small" label=${`Theme: ${title[theme]}`} title="Theme">
    ${THEMES.map((each) => html`<button aria-pressed=${each === theme} onClick=${() => applyTheme(each)}>${each === theme ? "✓ " : ""}${title[each]}</button>`)}
  <//>`;
}

// --- Help

const KEYS = [
  ["/", "search"],
  ["j k", "next row, row before"],
  ["x", "select the row"],
  ["Enter", "open the row"],
  ["r", "refresh"],
  ["t", "next theme"],
  ["?", "this list"],
];

function showHelp() {
  const rows = [...KEYS, ...PLACES.map((place) => [`g ${place.key}`, `go to ${place.label}`])];
  openDialog(
    (close) => html`<div class="body">
      <h2 id="dialog-title">Keyboard shortcuts</h2>
      <dl class="facts">${rows.map(([keys, words]) => html`<dt>${keys.split(" ").map((key) => html`<kbd>${key}</kbd> `)}</dt><dd>${words}</dd>`)}</dl>
      <div class="actions"><button class="button" onClick=${close}>Close</button></div>
    </div>`,
  );
}
