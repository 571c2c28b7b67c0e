// Turns Markdown into DOM nodes. Text becomes only text nodes, so nothing that a model writes can become markup or script.

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^\s`]*)/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const RULE = /^ {0,3}([-*_])(\s*\1){2,}\s*$/;
const INLINE = /(`+)([\s\S]+?)\1(?!`)|\[([^\]\n]+)\]\((https?:\/\/[^\s)]+)\)|(https?:\/\/[^\s<>()]+[^\s<>().,;:!?'"])|\*\*([\s\S]+?)\*\*|__([^_]+?)__|~~([\s\S]+?)~~|\*(?!\s)([^*\n]+?)\*|(?<![\w_])_(?!\s)([^_\n]+?)_(?![\w_])/g;

export function element(name, properties = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key in node) node[key] = value;
    else node.setAttribute(key, value);
  }
  node.append(...children);
  return node;
}

function link(address, text) {
  return element("a", { href: address, target: "_blank", rel: "noopener noreferrer" }, text);
}

function inline(text) {
  const nodes = [];
  let end = 0;
  for (const match of text.matchAll(INLINE)) {
    if (match.index > end) nodes.push(...lines(text.slice(end, match.index)));
    const [whole, , code, label, address, bare, strong, strongToo, struck, soft, softToo] = match;
    if (code !== undefined) nodes.push(element("code", {}, code.trim() || code));
    else if (label !== undefined) nodes.push(link(address, label));
    else if (bare !== undefined) nodes.push(link(bare, bare));
    else if (strong ?? strongToo) nodes.push(element("strong", {}, ...inline(strong ?? strongToo)));
    else if (struck !== undefined) nodes.push(element("del", {}, ...inline(struck)));
    else nodes.push(element("em", {}, ...inline(soft ?? softToo)));
    end = match.index + whole.length;
  }
  if (end < text.length) nodes.push(...lines(text.slice(end)));
  return nodes;
}

function lines(text) {
  return text.split("\n").flatMap((line, index) => (index ? [element("br"), line] : [line]));
}

function codeBlock(source, language) {
  const copy = element("button", { type: "button" }, "Copy");
  copy.addEventListener("click", async () => {
    await navigator.clipboard.writeText(source);
    copy.textContent = "Copied";
    setTimeout(() => (copy.textContent = "Copy"), 1500);
  });
  const parts = [element("pre", {}, element("code", {}, source)), copy];
  if (language) parts.push(element("span", { className: "language" }, language));
  return element("div", { className: "code" }, ...parts);
}

function cells(line) {
  return line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replace(/\\\|/g, "|"));
}

function table(rows) {
  const row = (name, line) => element("tr", {}, ...cells(line).map((cell) => element(name, {}, ...inline(cell))));
  const body = rows.slice(2).map((line) => row("td", line));
  return element("table", {}, element("thead", {}, row("th", rows[0])), element("tbody", {}, ...body));
}

function list(rows) {
  const [, indent, mark] = rows[0].match(ITEM);
  const ordered = /\d/.test(mark);
  const node = element(ordered ? "ol" : "ul");
  if (ordered) node.start = parseInt(mark, 10);
  let item = [];
  const close = () => {
    if (!item.length) return;
    const [first, ...rest] = item;
    const nested = rest.findIndex((line) => ITEM.test(line));
    const own = [first, ...(nested < 0 ? rest : rest.slice(0, nested)).map((line) => line.trim())].join("\n").trim();
    node.append(element("li", {}, ...inline(own), ...(nested < 0 ? [] : [list(rest.slice(nested))])));
    item = [];
  };
  for (const line of rows) {
    const match = line.match(ITEM);
    if (match && match[1].length <= indent.length) {
      close();
      item.push(match[3]);
    } else item.push(line);
  }
  close();
  return node;
}

// Splits Markdown into blocks {source, build}. As an answer grows, blocks with an unchanged source are not rebuilt.
function blocks(text) {
  const rows = text.replace(/\r\n?/g, "\n").split("\n");
  const found = [];
  let at = 0;
  const take = (test) => {
    const start = at;
    while (at < rows.length && test(rows[at], at - start)) at += 1;
    return rows.slice(start, at);
  };
  const add = (kind, lines_, build) => found.push({ source: `${kind}\n${lines_.join("\n")}`, build });
  while (at < rows.length) {
    const row = rows[at];
    const fence = row.match(FENCE);
    if (fence) {
      at += 1;
      const body = take((line) => !(line.trim().startsWith(fence[1]) && line.trim().replaceAll(fence[1][0], "") === ""));
      at += 1;
      add(`code ${fence[2]}`, body, () => codeBlock(body.join("\n"), fence[2]));
    } else if (!row.trim()) at += 1;
    else if (RULE.test(row)) {
      at += 1;
      add("rule", [], () => element("hr"));
    } else if (/^ {0,3}#{1,6}\s/.test(row)) {
      at += 1;
      const [, marks, title] = row.trim().match(/^(#{1,6})\s+(.*?)\s*#*$/);
      add("heading", [row], () => element(`h${marks.length}`, {}, ...inline(title)));
    } else if (/^ {0,3}>/.test(row)) {
      const body = take((line) => /^ {0,3}>/.test(line)).map((line) => line.replace(/^ {0,3}> ?/, ""));
      add("quote", body, () => element("blockquote", {}, ...blocks(body.join("\n")).map((block) => block.build())));
    } else if (ITEM.test(row)) {
      const body = take((line, index) => index === 0 || ITEM.test(line) || /^\s+\S/.test(line));
      add("list", body, () => list(body));
    } else if (row.includes("|") && /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/.test(rows[at + 1] ?? "") && rows[at + 1].includes("-")) {
      const body = take((line) => line.includes("|"));
      add("table", body, () => table(body));
    } else {
      const body = take((line, index) => index === 0 || (line.trim() && !FENCE.test(line) && !ITEM.test(line) && !/^ {0,3}(#{1,6}\s|>)/.test(line)));
      add("text", body, () => element("p", {}, ...inline(body.join("\n"))));
    }
  }
  return found;
}

// Shows `text` in `node`. Unchanged blocks are kept, so that a selection in them survives.
export function render(node, text) {
  const wanted = blocks(text);
  const kept = node.renderedSources ?? [];
  let same = 0;
  while (same < wanted.length && same < kept.length && wanted[same].source === kept[same]) same += 1;
  while (node.childNodes.length > same) node.lastChild.remove();
  for (const block of wanted.slice(same)) node.append(block.build());
  node.renderedSources = wanted.map((block) => block.source);
}
