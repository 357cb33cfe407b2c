// From the first byte to the first screen.
import { Fragment, html, render, useEffect } from "./lib.js";
import { DialogHost, ToastHost, attempt, closeDialog } from "./parts/dialog.js";
import { Empty, Loading, Trouble } from "./parts/marks.js";
import { Link, useRoute } from "./router.js";
import { Audit } from "./screens/audit.js";
import { Dead } from "./screens/dead.js";
import { Job } from "./screens/job.js";
import { Jobs } from "./screens/jobs.js";
import { Overview } from "./screens/overview.js";
import { Queues } from "./screens/queues.js";
import { Schedule } from "./screens/schedule.js";
import { Schedules } from "./screens/schedules.js";
import { SignIn } from "./screens/sign-in.js";
import { StoreScreen } from "./screens/store.js";
import { Workers } from "./screens/workers.js";
import { session, useSession } from "./session.js";
import { Shell } from "./shell.js";

const SCREENS = {
  "/": [Overview, "Overview"],
  "/jobs": [Jobs, "Jobs"],
  "/job": [Job, "Job"],
  "/dead": [Dead, "Dead jobs"],
  "/schedules": [Schedules, "Schedules"],
  "/schedule": [Schedule, "Schedule"],
  "/queues": [Queues, "Queues"],
  "/workers": [Workers, "Workers"],
  "/store": [StoreScreen, "Store"],
  "/audit": [Audit, "Audit"],
};

function Page() {
  const { document: who, problem } = useSession();
  const { path, query } = useRoute();
  const [Screen, title] = SCREENS[path] ?? [Missing, "Not found"];
  const signedIn = who !== null && (!who.keys || who.who !== null);
  useEffect(() => void session.load(), []);
  useEffect(() => {
    closeDialog();
    const badge = who?.environment ? ` · ${who.environment.name}` : "";
    document.title = `${signedIn ? title : "Sign in"} · Tickwheel${badge}`;
    // Those who can't see it hear that it is another screen.
    document.querySelector("h1")?.focus({ preventScroll: true });
  }, [path, signedIn]);
  if (who === null) return problem ? html`<main class="alone"><${Trouble} problem=${problem} retry=${() => session.load()} /></main>` : html`<${Loading} />`;
  if (!signedIn) return html`<${SignIn} />`;
  if (!session.may("read")) return html`<${NoReading} who=${who} />`;
  // Another thing of the same kind is another screen, with nothing left of the one before.
  return html`<${Shell}><${Screen} key=${`${path} ${query.id ?? query.name ?? ""}`} /><//>`;
}

function NoReading({ who }) {
  return html`<main class="sign-in"><form class="panel" onSubmit=${(event) => { event.preventDefault(); attempt(() => session.signOut()); }}>
    <h1 tabindex="-1">Nothing to see with this key</h1>
    <p>The key <b><bdi>${who.who}</bdi></b> has the scopes ${who.scopes.join(", ")}: it may not read. Sign in with a key that has the scope read.</p>
    <button class="button main">Sign out</button></form></main>`;
}

function Missing() {
  return html`<h1 tabindex="-1">Not found</h1>
    <${Empty} title="There is no such page."><${Link} to="/">Go to the overview<//><//>`;
}

render(html`<${Fragment}><${Page} /><${DialogHost} /><${ToastHost} /><//>`, document.getElementById("app"));
