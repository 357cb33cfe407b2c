// Which screen, with which query: the URL holds all of it.
import { Source, html, useSource } from "./lib.js";

const base = new URL(document.baseURI);

class Route extends Source {
  constructor() {
    super();
    this.#read();
    addEventListener("popstate", () => {
      this.#read();
      this.tell();
    });
  }

  #read() {
    const path = decodeURI(location.pathname);
    const root = decodeURI(base.pathname);
    this.path = path.startsWith(root) ? `/${path.slice(root.length).replace(/\/+$/, "")}` : "/";
    this.query = Object.fromEntries(new URLSearchParams(location.search));
  }

  /** Go to a screen. `replace`: without a new entry in the browser's history. */
  go(path, { replace = false } = {}) {
    const target = new URL(path.replace(/^\//, ""), base);
    if (target.href === location.href) return;
    const elsewhere = target.pathname !== location.pathname;
    history[replace ? "replaceState" : "pushState"](null, "", target);
    this.#read();
    this.tell();
    if (elsewhere) scrollTo(0, 0);
  }

  /** Change some of the query; null removes a name. */
  set(changes, options) {
    const query = { ...this.query, ...changes };
    this.go(link(this.path, query), options);
  }
}

export const route = new Route();

export function useRoute() {
  useSource(route);
  return route;
}

/** A path of the dashboard with its query. */
export function link(path, query = {}) {
  const parts = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    if (value !== null && value !== undefined && value !== "") parts.append(name, value);
  }
  const text = parts.toString();
  return text ? `${path}?${text}` : path;
}

/** A link to a screen: without a reload, unless it should open elsewhere. */
export function Link({ to, children, ...more }) {
  const follow = (event) => {
    if (event.button !== 0 || event.metaKey || event.ctrlKey || event.shiftKey || event.altKey) return;
    event.preventDefault();
    route.go(to);
  };
  const href = new URL(to.replace(/^\//, ""), base).href;
  return html`<a ...${more} href=${href} onClick=${follow}>${children}</a>`;
}
