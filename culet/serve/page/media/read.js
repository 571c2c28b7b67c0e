// Reads a file into a medium: {kind, type, name, blob, width, height, seconds}. Files that the server would refuse are refused
// here, before anything is sent.

import { acceptedKinds, acceptedTypes, formatNames, kindNames, NAMES, whatIsAccepted } from "./accepted.js";
import { asAudio, HEAD_BYTES, kindOf, typeOf } from "./formats.js";

const MEGABYTE = 1 << 20;
const TEXT_BYTES = 64 << 10; // of a request, kept free for what is not media
const BASE64_SHARE = 3 / 4; // of the bytes in base64 text
const MEASURE_MS = 10_000;
const SINGULAR = { image: "an image", audio: "a recording", video: "a video" };

export class Refusal extends Error {}

const inMegabytes = (bytes) => `${(bytes / MEGABYTE).toFixed(1)} MB`;

// Returns {width, height, seconds} of a video or a recording. They are missing if the browser cannot play it.
function measureTrack(blob) {
  const address = URL.createObjectURL(blob);
  const player = document.createElement("video");
  player.preload = "metadata";
  return new Promise((resolve) => {
    player.onerror = () => resolve({});
    player.onloadedmetadata = () =>
      resolve({ width: player.videoWidth, height: player.videoHeight, seconds: Number.isFinite(player.duration) ? player.duration : undefined });
    setTimeout(() => resolve({}), MEASURE_MS);
    player.src = address;
  }).finally(() => URL.revokeObjectURL(address));
}

async function measureImage(blob, name) {
  let picture;
  try {
    picture = await createImageBitmap(blob);
  } catch {
    throw new Refusal(`${name}: the picture is damaged or too large for this browser.`);
  }
  const { width, height } = picture;
  picture.close();
  return { width, height };
}

function checkKind(name, kind, type) {
  const given = whatIsAccepted();
  if (!kind) throw new Refusal(`${name}: this cannot be attached. Possible are ${formatNames(acceptedTypes())}.`);
  if (!given[kind]) throw new Refusal(`${name}: this is ${SINGULAR[kind]}, but the server takes only ${kindNames()}.`);
  if (!given[kind].types.includes(type)) throw new Refusal(`${name}: this format cannot be read. Possible are ${formatNames(given[kind].types)}.`);
}

function checkSize({ kind, name, width, height, seconds }, numBytes) {
  const given = whatIsAccepted()[kind];
  if (numBytes > given.max_bytes) {
    throw new Refusal(`${name} has ${inMegabytes(numBytes)}, but ${SINGULAR[kind]} may have at most ${inMegabytes(given.max_bytes)}.`);
  }
  if (width * height > given.max_pixels) {
    throw new Refusal(`${name} has ${width} x ${height} pixels, but an image may have at most ${given.max_pixels / 1e6} million.`);
  }
  if (seconds > given.max_s + 1e-3) {
    throw new Refusal(`${name} is ${seconds.toFixed(1)} s long, but this model hears at most ${given.max_s} s at once.`);
  }
}

// Returns {kind, type} and what the browser can measure before it reads the whole file.
async function examine(file) {
  const type = typeOf(new Uint8Array(await file.slice(0, HEAD_BYTES).arrayBuffer()));
  if (!type || kindOf(type) === "image") return { kind: type && "image", type };
  const facts = await measureTrack(file);
  const isSound = kindOf(type) === "audio" || facts.width === 0 || (facts.width === undefined && file.type.startsWith("audio/"));
  return isSound ? { kind: "audio", type: asAudio(type), seconds: facts.seconds } : { kind: "video", type, ...facts };
}

async function read(file) {
  const { name } = file;
  if (!file.size) throw new Refusal(`${name} is empty.`);
  const facts = await examine(file);
  checkKind(name, facts.kind, facts.type);
  const medium = { name, ...facts };
  checkSize(medium, file.size);
  medium.blob = new Blob([await file.arrayBuffer()], { type: facts.type }); // the file may change or vanish
  if (facts.kind === "image") Object.assign(medium, await measureImage(medium.blob, name));
  checkSize(medium, file.size);
  return medium;
}

// Raises a Refusal that says why a file cannot be attached.
export async function readMedium(file) {
  if (whatIsAccepted() === undefined) throw new Refusal(`${file.name}: the server has not said yet what its model reads.`);
  if (!acceptedKinds().length) throw new Refusal(`${file.name}: this model reads only text.`);
  try {
    return await read(file);
  } catch (error) {
    throw error instanceof Refusal ? error : new Refusal(`${file.name} cannot be read.`);
  }
}

// Raises a Refusal if a request cannot have this medium too. `others` are those of the conversation and of the next message.
export function checkTogether(medium, others) {
  const { kind, name } = medium;
  const given = whatIsAccepted();
  const most = given[kind].max_count;
  const count = others.filter((other) => other.kind === kind).length + 1;
  if (most !== null && count > most) {
    throw new Refusal(`${name}: this server takes at most ${most} ${NAMES[kind]} in one conversation.`);
  }
  const numBytes = [medium, ...others].reduce((sum, { blob }) => sum + blob.size, 0);
  const maxBytes = (given.max_body_bytes - TEXT_BYTES) * BASE64_SHARE;
  if (numBytes > maxBytes) {
    const problem = `with it this conversation has ${inMegabytes(numBytes)} of media, but a request holds at most ${inMegabytes(maxBytes)}`;
    throw new Refusal(`${name}: ${problem}. Remove some, or begin a new chat.`);
  }
}
