// What the server takes besides text, as `GET /v1/models` says it.

let accepted; // undefined until the server has answered, null if the model reads only text

export const KINDS = ["image", "audio", "video"];
export const NAMES = { image: "images", audio: "audio", video: "videos" };
const FORMATS = { mpeg: "MP3", quicktime: "MOV", webp: "WebP", webm: "WebM", "x-matroska": "Matroska" };

export function setAccepted(media) {
  accepted = media;
}

export function whatIsAccepted() {
  return accepted;
}

export function acceptedKinds() {
  return KINDS.filter((kind) => accepted?.[kind]);
}

export function acceptedTypes() {
  return acceptedKinds().flatMap((kind) => accepted[kind].types);
}

// Returns the formats as people call them, such as "JPEG, PNG".
export function formatNames(types) {
  const names = types.map((type) => type.split("/")[1]).map((name) => FORMATS[name] ?? name.toUpperCase());
  return [...new Set(names)].join(", ");
}

// Returns "images, audio or videos", as far as the model reads them.
export function kindNames() {
  return new Intl.ListFormat("en-GB", { type: "disjunction" }).format(acceptedKinds().map((kind) => NAMES[kind]));
}
