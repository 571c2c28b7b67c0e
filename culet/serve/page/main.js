// Sets up the page: views and their addresses, theme, keyboard shortcuts, model name.

import { call } from "./api.js";
import { setModel } from "./chat/answer.js";
import { currentConversation, editLast, focusComposer, openConversation, regenerateLast, say, showExamples, stop, watchChat } from "./chat/chat.js";
import { showThinking } from "./chat/composer.js";
import { startPlots, stopPlots } from "./engine/engine.js";
import { icon } from "./parts/dom.js";
import { toast } from "./parts/toast.js";
import { setAccepted } from "./media/accepted.js";
import { chooseFiles, showAbilities, showSizes } from "./media/tray.js";
import { openSettings, watchSettings } from "./settings.js";
import { addressOf, focusSearch, markOpen, titleOf, watchSidebar } from "./sidebar.js";
import { onChange, onStorageFull, startStore } from "./store/conversations.js";
import { startDrafts } from "./store/drafts.js";

const byId = (id) => document.getElementById(id);
const narrow = matchMedia("(max-width: 760px)");
let model = "";

// Addresses: `#/chat/ID`, `#/engine`, or nothing for a new chat

function route() {
  const [, name, id] = location.hash.split("/");
  const isEngine = name === "engine";
  byId("view-chat").hidden = isEngine;
  byId("view-engine").hidden = !isEngine;
  if (isEngine) byId("open-engine").setAttribute("aria-current", "page");
  else byId("open-engine").removeAttribute("aria-current");
  if (isEngine) {
    startPlots(explain);
    markOpen(null);
  } else {
    stopPlots();
    openConversation(id ?? null);
  }
  if (narrow.matches) showSidebar(false);
}

function goTo(hash) {
  if (location.hash === hash) route();
  else location.hash = hash;
}

function newChat() {
  goTo("#/");
  focusComposer();
}

function onOpened(id) {
  const hash = id ? addressOf(id) : "#/";
  if (location.hash !== hash) history.pushState(null, "", hash);
  markOpen(id);
  showTitle();
}

function showTitle() {
  document.title = [titleOf(currentConversation()), "Culet", model].filter(Boolean).join(" · ");
}

function showSidebar(isShown) {
  document.body.classList.toggle("no-sidebar", !isShown);
  byId("toggle-sidebar").setAttribute("aria-expanded", String(isShown));
  byId("sidebar").inert = !isShown;
  if (!narrow.matches) localStorage.setItem("culet.sidebar", isShown ? "shown" : "hidden");
}

function toggleSidebar() {
  showSidebar(document.body.classList.contains("no-sidebar"));
  if (narrow.matches && !byId("sidebar").inert) byId("new-chat").focus();
}

// The server

function explain(error) {
  if (error.status === 401) {
    stopPlots();
    say("This server requires an API key.");
    if (!byId("settings").open) openSettings("key");
  } else say(error.message);
}

async function showModel() {
  try {
    const { data } = await (await call("v1/models")).json();
    model = data[0].id;
    setModel(model);
    byId("model").textContent = model;
    setAccepted(data[0].media);
    showAbilities();
    showTitle();
    say("");
    showExamples((await (await call("examples")).json()).examples);
  } catch (error) {
    explain(error);
  }
}

// Theme

const system = matchMedia("(prefers-color-scheme: dark)");

function showTheme() {
  const theme = localStorage.getItem("culet.theme") ?? (system.matches ? "dark" : "light");
  document.documentElement.dataset.theme = theme;
  const other = theme === "dark" ? "light" : "dark";
  byId("theme").lastChild.textContent = `${other[0].toUpperCase()}${other.slice(1)} theme`;
}

function switchTheme() {
  localStorage.setItem("culet.theme", document.documentElement.dataset.theme === "dark" ? "light" : "dark");
  showTheme();
}

// Keyboard

const SHORTCUTS = { KeyN: newChat, KeyS: () => openSettings(), KeyK: () => (showSidebar(true), focusSearch()), KeyB: toggleSidebar };
const CHAT_SHORTCUTS = { KeyR: regenerateLast, KeyE: editLast, KeyM: focusComposer, KeyA: chooseFiles };

function onKey(event) {
  const isChat = !byId("view-chat").hidden; // else keys must not change a conversation that nobody sees
  if (event.key === "Escape" && !document.querySelector("dialog[open], .menu")) {
    if (!(isChat && stop()) && narrow.matches) showSidebar(false);
  }
  if (!event.altKey || event.ctrlKey || event.metaKey || byId("settings").open) return;
  const act = SHORTCUTS[event.code] ?? (isChat ? CHAT_SHORTCUTS[event.code] : null);
  if (!act) return;
  event.preventDefault();
  act();
}

async function start() {
  for (const node of document.querySelectorAll("[data-icon]")) node.prepend(icon(node.dataset.icon));
  showTheme();
  showSidebar(!narrow.matches && localStorage.getItem("culet.sidebar") !== "hidden");
  system.addEventListener("change", showTheme);
  narrow.addEventListener("change", () => showSidebar(!narrow.matches));
  addEventListener("storage", ({ key }) => key === "culet.theme" && showTheme());
  byId("theme").addEventListener("click", switchTheme);
  byId("skip").addEventListener("click", focusComposer);
  byId("new-chat").addEventListener("click", newChat);
  byId("toggle-sidebar").addEventListener("click", toggleSidebar);
  byId("close-sidebar").addEventListener("click", toggleSidebar);
  byId("shade").addEventListener("click", toggleSidebar);
  byId("conversations").addEventListener("click", ({ target }) => narrow.matches && target.closest("a") && showSidebar(false));
  document.addEventListener("keydown", onKey);
  showModel();
  const isKept = await startStore();
  await startDrafts();
  if (!isKept) toast("This browser keeps no data for this page. Conversations are lost when it is closed.");
  onStorageFull((names) => {
    const what = names.join(", ") || "What is new";
    toast(`The browser's storage is full. ${what} will be lost when this tab is closed. Export and delete conversations to make room.`);
  });
  onChange(({ conversation }) => conversation?.id === currentConversation() && showTitle());
  watchChat(onOpened);
  watchSidebar({ open: (id) => goTo(id ? addressOf(id) : "#/") });
  watchSettings(() => {
    showModel();
    showThinking();
    showSizes();
    if (!byId("view-engine").hidden) startPlots(explain);
  });
  addEventListener("hashchange", route);
  addEventListener("popstate", () => currentConversation() !== (location.hash.split("/")[2] ?? null) && route());
  route();
  document.documentElement.dataset.ready = "";
}

start();
