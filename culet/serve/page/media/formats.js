// Says what a file is by its first bytes, as the server does. Names and stated types do not count.

export const HEAD_BYTES = 64;

const SIGNATURES = [
  ["image/jpeg", 0, "\xff\xd8\xff"],
  ["image/png", 0, "\x89PNG\r\n\x1a\n"],
  ["image/gif", 0, "GIF8"],
  ["image/webp", 8, "WEBP"],
  ["audio/wav", 8, "WAVE"],
  ["audio/flac", 0, "fLaC"],
  ["audio/ogg", 0, "OggS"],
  ["audio/mpeg", 0, "ID3"],
];
const PICTURE_BRANDS = ["heic", "heix", "heif", "mif1", "msf1", "avif", "avis"]; // pictures in a file like MP4

// Returns the media type, or null for a file that is no medium. A container counts as video here, but may hold only sound.
export function typeOf(bytes) {
  const head = String.fromCharCode(...bytes.subarray(0, HEAD_BYTES));
  const found = SIGNATURES.find(([, at, mark]) => head.startsWith(mark, at));
  if (found) return found[0];
  if (head.startsWith("ftyp", 4)) {
    const brand = head.slice(8, 12);
    if (PICTURE_BRANDS.includes(brand)) return null;
    return brand === "qt  " ? "video/quicktime" : "video/mp4";
  }
  if (head.startsWith("\x1aE\xdf\xa3")) return head.includes("webm") ? "video/webm" : "video/x-matroska";
  const isMp3 = bytes[0] === 0xff && [0xe2, 0xe4, 0xe6].includes(bytes[1] & 0xe6);
  return isMp3 ? "audio/mpeg" : null;
}

export const kindOf = (type) => type.split("/")[0];

// Returns the type of a container that holds only sound.
export function asAudio(type) {
  return type === "video/quicktime" ? "audio/mp4" : type.replace("video/", "audio/");
}
