// Shows media: thumbnails, players, and a picture in full size.

import { element, icon, iconButton } from "../parts/dom.js";

const addresses = new WeakMap(); // of blobs

function addressOf(blob) {
  if (!addresses.has(blob)) addresses.set(blob, URL.createObjectURL(blob));
  return addresses.get(blob);
}

// Frees a medium that is not shown any more.
export function forget({ blob }) {
  URL.revokeObjectURL(addresses.get(blob));
  addresses.delete(blob);
}

export function clock(seconds) {
  const whole = Math.floor(seconds);
  return `${Math.floor(whole / 60)}:${String(whole % 60).padStart(2, "0")}`;
}

function openViewer({ name, blob }) {
  const close = iconButton("close", "Close (Esc)", () => viewer.close());
  const viewer = element("dialog", { className: "viewer", "aria-label": name }, element("img", { src: addressOf(blob), alt: name }), close);
  viewer.addEventListener("click", ({ target }) => target === viewer && viewer.close());
  viewer.addEventListener("close", () => viewer.remove());
  document.body.append(viewer);
  viewer.showModal();
}

function thumbnail(medium, isSmall) {
  const { kind, name, blob } = medium;
  // What a browser could not keep is named, and the model does not see it any more.
  if (!blob) return element("p", { className: "lost" }, icon("info"), `${name} is not kept in this browser. The model no longer sees it.`);
  if (kind === "audio") return element("audio", { src: addressOf(blob), controls: true, preload: "metadata", "aria-label": name });
  if (kind === "video") return element("video", { src: addressOf(blob), controls: !isSmall, preload: "metadata", "aria-label": name });
  const button = element("button", { type: "button", className: "picture", title: name, "aria-label": `Show ${name}` });
  button.append(element("img", { src: addressOf(blob), alt: name, decoding: "async" }));
  button.addEventListener("click", () => openViewer(medium));
  return button;
}

// Fills `list` with the media. With `remove`, each has a button that calls it with the medium. With `describe`, they are small
// and have their name and what it returns beside them.
export function showMedia(list, media, { remove = null, describe = null } = {}) {
  list.hidden = !media.length;
  list.replaceChildren(
    ...media.map((medium) => {
      const facts = element("span", { className: "facts" }, element("b", { title: medium.name }, medium.name));
      if (describe) facts.append(element("span", {}, describe(medium)));
      const button = remove && iconButton("close", `Remove ${medium.name}`, () => remove(medium), { className: "quiet remove" });
      return element("li", { className: medium.blob ? medium.kind : "lost-one" }, thumbnail(medium, Boolean(describe)), describe ? facts : null, button);
    }),
  );
}
