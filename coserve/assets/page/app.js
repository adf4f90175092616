// The frame: which view is shown, whether the daemon answers, the key.

import { adapters } from "./adapters.js";
import { ApiError, askKey, health } from "./api.js";
import { el, say, setText, showError, sleep } from "./dom.js";
import { jobs } from "./jobs.js";
import { overview } from "./overview.js";
import { playground } from "./playground.js";

const PERIOD = 2000;
const VIEWS = { overview, jobs, adapters, playground };
const main = document.getElementById("main");
let current = null;
let answered = true;
let wake = () => {};

for (const [name, view] of Object.entries(VIEWS)) {
  view.section = el("section", { id: `view-${name}`, "aria-labelledby": `title-${name}`, hidden: true });
  view.section.append(el("h1", { id: `title-${name}`, tabindex: -1 }, view.title), ...view.build());
  main.append(view.section);
}

/** Show the view that the address names; what follows its name is the view's own. */
function route() {
  const [name, argument = ""] = location.hash.slice(1).split("/").map(decodeURIComponent);
  const view = VIEWS[name] ?? overview;
  const moved = current && current !== view;
  if (moved) current.hide?.();
  current = view;
  for (const each of Object.values(VIEWS)) each.section.hidden = each !== view;
  for (const link of document.querySelectorAll("nav a")) {
    link.toggleAttribute("aria-current", VIEWS[link.hash.slice(1)] === view);
    if (link.hasAttribute("aria-current")) link.setAttribute("aria-current", "page");
  }
  document.title = `${view.title} – coserve`;
  view.show?.(argument);
  if (moved) {
    showError("");
    view.section.querySelector("h1").focus();
  }
  wake();
}

function showState(found) {
  const badge = document.getElementById("state");
  document.getElementById("down").hidden = found !== null;
  const warming = found?.warming;
  const text = found === null ? "not answering" : warming ? `${warming.what} ${warming.done}/${warming.total}` : found.status;
  setText(badge, text);
  badge.className = `badge ${found?.status ?? "dead"}`;
  if (answered !== (found !== null)) say(found ? "The daemon answers again." : "The daemon does not answer.");
  answered = found !== null;
}

/** Ask for the daemon's state, and let the view bring itself up to date, until the page is closed. */
async function beat() {
  for (;;) {
    try {
      const found = await health();
      showState(found);
      await current.tick?.(found);
    } catch (error) {
      if (error instanceof ApiError) showError(error.message);
      else if (error instanceof TypeError) showState(null);
      else throw error;
    }
    await Promise.race([sleep(document.hidden ? 5 * PERIOD : PERIOD), new Promise((resolve) => (wake = resolve))]);
  }
}

document.getElementById("key-button").onclick = async () => {
  if (await askKey("It is kept in this tab only, until the tab is closed.")) showError("");
  wake();
};
document.querySelector("#error button").onclick = () => showError("");
window.addEventListener("hashchange", route);
route();
beat();
