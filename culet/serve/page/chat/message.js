// Shows one message: the user's with an editor, or an answer with thoughts, tool calls and statistics.

import { copyButton, element, icon, iconButton } from "../parts/dom.js";
import { showMedia } from "../media/show.js";
import { draft, keepDraft } from "../store/drafts.js";
import { MarkdownView } from "./markdown.js";
import { callCard } from "./tools.js";

// Lets the user go from one branch to another: ‹ 2/3 ›.
function branchSwitch({ branches, message, goTo }) {
  if (branches.length < 2) return null;
  const at = branches.findIndex(({ id }) => id === message.id);
  const step = (name, label, by) => iconButton(name, label, () => goTo(branches[at + by]), { disabled: !branches[at + by] });
  return element(
    "span",
    { className: "branches", role: "group", "aria-label": `Version ${at + 1} of ${branches.length}` },
    step("left", "Previous version", -1),
    element("span", {}, `${at + 1}/${branches.length}`),
    step("right", "Next version", 1),
  );
}

function grow(area) {
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight + 2}px`;
}

// A foot is rebuilt only if it changes, so that a focused button keeps the focus.
function fillFoot(foot, key, makeButtons) {
  if (foot.key === key) return;
  foot.key = key;
  foot.replaceChildren(...makeButtons().filter(Boolean));
}

export class UserItem {
  constructor(acts) {
    this.acts = acts;
    this.media = element("ul", { className: "media", "aria-label": "Attached" });
    this.body = element("div", { className: "body" });
    this.foot = element("div", { className: "foot" });
    this.node = element("li", { className: "user" }, element("h2", { className: "unseen" }, "You"), this.media, this.body, this.foot);
  }

  update(context) {
    const { message, branches } = context;
    if (!this.message || this.message.media !== message.media) showMedia(this.media, message.media ?? []);
    this.message = message;
    this.body.hidden = !message.content;
    if (this.body.textContent !== message.content) this.body.textContent = message.content;
    fillFoot(this.foot, JSON.stringify(branches.map(({ id }) => id).concat(message.id)), () => [
      branchSwitch({ ...context, goTo: this.acts.goTo }),
      message.content ? copyButton("Copy the message", () => message.content) : null,
      (this.editButton = iconButton("pencil", "Edit this message", () => this.edit())),
    ]);
  }

  edit() {
    if (this.editor) return;
    let media = this.message.media ?? [];
    const show = () => showMedia(this.media, media, { remove });
    const remove = (removed) => {
      media = media.filter((medium) => medium !== removed);
      show();
      area.focus();
    };
    const area = element("textarea", { rows: 1, value: draft(this.message.id) || this.message.content, "aria-label": "Edited message" });
    const cancel = element("button", { type: "button" }, "Cancel");
    this.editor = element("form", { className: "editor" }, area, element("div", { className: "row" }, cancel, element("button", { className: "primary" }, "Send")));
    area.addEventListener("input", () => {
      grow(area);
      keepDraft(this.message.id, area.value === this.message.content ? "" : area.value);
    });
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        this.close();
      } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.editor.requestSubmit();
      }
    });
    cancel.addEventListener("click", () => this.close());
    this.editor.addEventListener("submit", (event) => {
      event.preventDefault();
      const text = area.value.trim();
      if (!text && !media.length) return;
      const isChanged = text !== this.message.content || media.length !== (this.message.media ?? []).length;
      keepDraft(this.message.id, "");
      this.close();
      if (isChanged) this.acts.sendEdited(this.message, text, media);
    });
    this.node.classList.add("editing");
    this.node.append(this.editor);
    show();
    grow(area);
    area.focus();
  }

  // Closes the editor. Unsent changes are kept, and shown when it is opened again.
  close() {
    this.editor?.remove();
    this.editor = null;
    showMedia(this.media, this.message.media ?? []);
    this.node.classList.remove("editing");
    this.editButton.focus();
  }
}

const NOTES = { stopped: "Stopped", writing: "Interrupted" };
const FINISH_NOTES = { length: "Token limit reached", empty_after_thinking: "Ended after thinking, without an answer" };

function describe(message) {
  const { stats } = message;
  if (!stats) return [];
  const facts = [];
  const has = (name) => Number.isFinite(stats[name]); // an imported file may have anything
  if (has("tokens")) facts.push(["Tokens", stats.tokens.toLocaleString()]);
  if (has("tokens_per_s")) facts.push(["Tokens per second", stats.tokens_per_s.toFixed(1)]);
  if (has("first_ms")) facts.push(["First token", `${stats.first_ms} ms`]);
  if (has("prompt_tokens")) facts.push(["Prompt", `${stats.prompt_tokens.toLocaleString()} tokens, ${stats.cached_tokens ?? 0} reused`]);
  if (stats.model) facts.push(["Model", stats.model]);
  return facts;
}

export class AnswerItem {
  constructor(acts) {
    this.acts = acts;
    this.body = element("div", { className: "body md" });
    this.view = new MarkdownView(this.body);
    this.thought = element("div", { className: "thought" });
    this.summary = element("summary");
    this.thinking = element("details", { className: "thinking", hidden: true }, this.summary, this.thought);
    this.calls = element("div", { className: "calls" });
    this.note = element("p", { className: "note", hidden: true });
    this.stats = element("dl", { className: "stats", hidden: true });
    this.foot = element("div", { className: "foot" });
    const title = element("h2", { className: "unseen" }, "Answer");
    this.node = element("li", { className: "assistant" }, title, this.thinking, this.body, this.calls, this.note, this.foot, this.stats);
  }

  update(context) {
    const { message, isWriting, results, isLast } = context;
    this.message = message;
    const hasThought = Boolean(message.reasoning_content);
    this.thinking.hidden = !hasThought;
    if (hasThought) {
      if (this.thought.textContent !== message.reasoning_content) this.thought.textContent = message.reasoning_content;
      this.summary.textContent = isWriting && !message.content ? "Thinking…" : "Thoughts";
    }
    this.view.show(message.content ?? "", isWriting);
    this.node.classList.toggle("writing", isWriting);
    this.node.classList.toggle("waiting", isWriting && !message.content && !hasThought && !message.tool_calls);
    this.#updateCalls(message, results, isLast && !isWriting);
    const note = message.state === "failed" ? message.note : (NOTES[message.state] ?? FINISH_NOTES[message.stats?.finish] ?? "");
    this.note.textContent = note;
    this.note.hidden = isWriting || !note;
    this.note.classList.toggle("failed", message.state === "failed");
    this.foot.hidden = isWriting;
    if (!isWriting) this.#updateFoot(context);
  }

  #updateCalls(message, results, canAnswer) {
    const key = JSON.stringify([message.tool_calls, results.length, canAnswer]);
    if (this.calls.key === key) return;
    this.calls.key = key;
    const give = canAnswer ? (call, text) => this.acts.giveResult(message, call, text) : null;
    const cards = (message.tool_calls ?? []).map((call) => callCard(call, results.find(({ tool_call_id }) => tool_call_id === call.id), give));
    this.calls.replaceChildren(...cards);
  }

  #updateFoot(context) {
    const { message, branches, isLast } = context;
    const facts = describe(message);
    const canContinue = isLast && message.content && !message.tool_calls && (message.state !== "done" || message.stats?.finish === "length");
    const key = JSON.stringify([branches.map(({ id }) => id), message.id, isLast, canContinue, facts, Boolean(message.content)]);
    fillFoot(this.foot, key, () => [
      branchSwitch({ ...context, goTo: this.acts.goTo }),
      message.content ? copyButton("Copy the answer", () => this.message.content) : null,
      iconButton("again", isLast ? "Regenerate (Alt+R)" : "Regenerate", () => this.acts.regenerate(this.message)),
      canContinue ? this.#continueButton() : null,
      facts.length ? this.#statsButton(facts) : null,
    ]);
  }

  #continueButton() {
    const button = element("button", { type: "button", className: "quiet labelled" }, icon("onward"), "Continue");
    button.addEventListener("click", () => this.acts.goOn(this.message));
    return button;
  }

  #statsButton(facts) {
    this.stats.replaceChildren(...facts.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))));
    const button = iconButton("info", "Statistics", () => {
      this.stats.hidden = !this.stats.hidden;
      button.setAttribute("aria-expanded", String(!this.stats.hidden));
    }, { "aria-expanded": String(!this.stats.hidden) });
    return button;
  }
}
