// Picture files that people give: checked before they are sent.

const MOST_BYTES = 24 << 20;
const KINDS = ["image/png", "image/jpeg", "image/webp"];

export class NotAPicture extends Error {}

// Return {blob, url, name, width, height} of a file. Throw NotAPicture with a sentence if it cannot be used.
export async function readPicture(blob, name = blob.name ?? "picture.png") {
  if (!KINDS.includes(blob.type)) throw new NotAPicture(`${name} is not a PNG, JPEG or WebP picture.`);
  if (blob.size > MOST_BYTES) throw new NotAPicture(`${name} is larger than ${MOST_BYTES >> 20} MiB.`);
  const url = URL.createObjectURL(blob);
  const image = new Image();
  image.src = url;
  try {
    await image.decode();
  } catch {
    URL.revokeObjectURL(url);
    throw new NotAPicture(`${name} cannot be read as a picture. It may be damaged.`);
  }
  return { blob, url, name, image, width: image.naturalWidth, height: image.naturalHeight };
}

export function saveAs(picture, name) {
  const link = document.createElement("a");
  link.href = picture.url;
  link.download = name;
  link.click();
}
