// Shows Markdown. The server turns it into nodes. Until they arrive, the text is shown as it is.

import { call } from "../api.js";
import { element } from "../parts/dom.js";
import { build } from "./nodes.js";

const PATIENCE_MS = 250; // then the text is shown without its format
const PAUSE_MS = 60; // between two requests for an answer that grows
const RETRY_MS = 1500; // after a failure, and twice as long after each further one
const MAX_RETRY_MS = 30_000;
const MAX_TEXTS = 32; // in one request
const MAX_CHARS = 60_000;
const MAX_CACHED = 500;

const cache = new Map(); // the blocks of complete texts, oldest first
let waiting = []; // texts for the next request, as [text, resolve, reject]

// Asks for the blocks of `text`. Texts that are asked for at the same time go into one request.
function ask(text) {
  return new Promise((resolve, reject) => {
    waiting.push([text, resolve, reject]);
    if (waiting.length === 1) setTimeout(sendWaiting);
  });
}

function sendWaiting() {
  while (waiting.length) {
    let size = 0;
    let count = 0;
    while (count < Math.min(waiting.length, MAX_TEXTS) && (count === 0 || size + waiting[count][0].length <= MAX_CHARS)) {
      size += waiting[count][0].length;
      count += 1;
    }
    send(waiting.splice(0, count));
  }
}

async function send(batch) {
  try {
    const body = JSON.stringify({ texts: batch.map(([text]) => text) });
    const response = await call("markdown", { method: "POST", headers: { "Content-Type": "application/json" }, body });
    const { documents } = await response.json();
    batch.forEach(([, resolve], index) => resolve(documents[index]));
  } catch (error) {
    batch.forEach(([, , reject]) => reject(error));
  }
}

function remember(text, blocks) {
  cache.delete(text);
  cache.set(text, blocks);
  if (cache.size > MAX_CACHED) cache.delete(cache.keys().next().value);
}

// Returns a text that grows as it will probably look, so that marks do not appear for a moment: unfinished bold text and code
// are closed, and an unfinished formula is left out.
function completed(text) {
  if ((text.match(/^ {0,3}(```|~~~)/gm) ?? []).length % 2) return text; // the end is code
  const rest = text.replace(/(\*{1,2}|_{1,2}|~{1,2}|`{1,2}|\[)$/, "");
  const block = rest.slice(rest.lastIndexOf("\n\n") + 1);
  const isOpen = (mark) => (block.split(mark).length - 1) % 2 === 1;
  if (isOpen("$$")) return rest.slice(0, rest.lastIndexOf("$$"));
  if (isOpen("`")) return `${rest}\``;
  return isOpen("**") ? `${rest.trimEnd()}**` : rest;
}

// Shows a text that may grow in one element.
export class MarkdownView {
  #text = "";
  #isGrowing = false;
  #isAsking = false;
  #numSettled = 0; // characters whose blocks cannot change any more
  #numSettledBlocks = 0;
  #numShown = 0; // characters whose blocks are shown
  #sources = []; // of the blocks that are shown
  #final = null; // the complete text that is shown with its format
  #rest = element("p", { className: "rest" });
  #timer = 0;
  #retryMs = RETRY_MS;

  constructor(node) {
    this.node = node;
  }

  show(text, isGrowing) {
    if (!text.startsWith(this.#text)) this.#forget();
    this.#text = text;
    this.#isGrowing = isGrowing;
    const known = isGrowing ? null : cache.get(text);
    if (known) this.#finish(text, known);
    else if (!isGrowing && this.#final === text) return;
    else if (text.length > this.#numShown || !isGrowing) this.#request();
  }

  #forget() {
    this.#numSettled = this.#numSettledBlocks = this.#numShown = 0;
    this.#final = null;
  }

  async #request() {
    if (this.#rest.isConnected) this.#showRest();
    else this.#timer ||= setTimeout(() => this.#showRest(), PATIENCE_MS);
    if (this.#isAsking) return; // the reply asks for what was added
    this.#isAsking = true;
    const text = this.#text;
    const isComplete = !this.#isGrowing;
    const begin = isComplete ? 0 : this.#numSettled;
    const asked = performance.now();
    let pause = isComplete ? 0 : PAUSE_MS;
    try {
      const blocks = text ? await ask(isComplete ? text : completed(text.slice(begin))) : [];
      if (text !== this.#text.slice(0, text.length)) this.#forget();
      else if (isComplete) this.#finish(text, blocks);
      else this.#grow(text, begin, blocks);
      pause += isComplete ? 0 : 2 * (performance.now() - asked);
      this.#retryMs = RETRY_MS;
    } catch (error) {
      this.#showRest();
      pause = this.#retryMs;
      this.#retryMs = Math.min(2 * pause, MAX_RETRY_MS);
      if (isComplete && error.status === 400) this.#final = text; // the server refuses this text, so it stays as it is
    }
    setTimeout(() => this.#goOn(), pause);
  }

  #goOn() {
    this.#isAsking = false;
    const isBehind = this.#isGrowing ? this.#numShown < this.#text.length : this.#final !== this.#text;
    if (isBehind && this.node.isConnected) this.#request();
  }

  #finish(text, blocks) {
    this.#apply(0, blocks);
    remember(text, blocks);
    this.#final = text;
    this.#numShown = text.length;
  }

  // Shows the blocks of the text after `begin`. All but the last two are settled: more text cannot change them.
  #grow(text, begin, blocks) {
    this.#apply(this.#numSettledBlocks, blocks);
    this.#numShown = text.length;
    const line = blocks.length > 2 ? blocks.at(-2)[0] : 0;
    if (!line) return;
    let end = begin;
    for (let number = 0; number < line; number += 1) end = text.indexOf("\n", end) + 1;
    this.#numSettled = end;
    this.#numSettledBlocks += blocks.filter(([first]) => first < line).length;
  }

  // Replaces the blocks from number `first` on. Blocks that stay the same keep their elements, so a selection survives.
  #apply(first, blocks) {
    this.#hideRest();
    const sources = blocks.map(([, node]) => JSON.stringify(node));
    blocks.forEach(([, node], index) => {
      const at = first + index;
      if (this.#sources[at] === sources[index]) return;
      const made = build(node);
      const block = made.nodeType === Node.TEXT_NODE ? element("p", {}, made) : made;
      if (this.node.children[at]) this.node.children[at].replaceWith(block);
      else this.node.append(block);
    });
    this.#sources = [...this.#sources.slice(0, first), ...sources];
    while (this.node.children.length > this.#sources.length) this.node.lastElementChild.remove();
  }

  #showRest() {
    this.#rest.textContent = this.#text.slice(this.#numShown);
    if (this.#rest.textContent) this.node.append(this.#rest);
  }

  #hideRest() {
    clearTimeout(this.#timer);
    this.#timer = 0;
    this.#rest.remove();
  }
}
