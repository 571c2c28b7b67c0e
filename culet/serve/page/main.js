// Sets up the page's tabs, theme, keyboard shortcuts, and model name.

import { call } from "./api.js";
import { isRunning, newChat, regenerate, say, setModel, stop, watchChat } from "./chat.js";
import { startPlots, stopPlots } from "./engine.js";
import { openSettings, watchSettings } from "./settings.js";

const TABS = ["chat", "engine"];
const tab = (name) => document.getElementById(`tab-${name}`);

function open(name) {
  for (const other of TABS) {
    tab(other).setAttribute("aria-selected", String(other === name));
    tab(other).tabIndex = other === name ? 0 : -1;
    document.getElementById(`view-${other}`).hidden = other !== name;
  }
  if (name === "engine") startPlots(explain);
  else stopPlots();
}

function explain(error) {
  if (error.status === 401) {
    stopPlots();
    if (!document.getElementById("settings").open) openSettings("key");
  } else say(error.message);
}

async function showModel() {
  try {
    const { data } = await (await call("v1/models")).json();
    setModel(data[0].id);
    document.getElementById("model").textContent = data[0].id;
    document.title = `Culet · ${data[0].id}`;
    say("");
  } catch (error) {
    explain(error);
  }
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
}

const system = matchMedia("(prefers-color-scheme: dark)");
const ownTheme = () => localStorage.getItem("culet.theme");
setTheme(ownTheme() ?? (system.matches ? "dark" : "light"));
system.addEventListener("change", () => ownTheme() ?? setTheme(system.matches ? "dark" : "light"));
document.getElementById("theme").addEventListener("click", () => {
  const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  localStorage.setItem("culet.theme", theme);
  setTheme(theme);
});

TABS.forEach((name, index) => {
  tab(name).addEventListener("click", () => open(name));
  tab(name).addEventListener("keydown", (event) => {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    const next = TABS[(index + (event.key === "ArrowRight" ? 1 : TABS.length - 1)) % TABS.length];
    open(next);
    tab(next).focus();
  });
});

document.getElementById("new-chat").addEventListener("click", () => {
  open("chat");
  newChat();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && isRunning() && !document.getElementById("settings").open) stop();
  if (!event.altKey || event.ctrlKey || event.metaKey) return;
  const act = { KeyN: newChat, KeyR: regenerate, KeyS: openSettings }[event.code];
  if (!act) return;
  event.preventDefault();
  act();
});

watchChat();
watchSettings(() => {
  showModel();
  if (!document.getElementById("view-engine").hidden) startPlots(explain);
});
showModel();
