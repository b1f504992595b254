// Draws a picture of PROMPT: node draw.js HOST:PORT PROMPT FILE. BOTTEGA_API_KEY is the key, if the gateway asks for one.
import { writeFileSync } from "node:fs";
import { createClient, type Interceptor } from "@connectrpc/connect";
import { createGrpcTransport } from "@connectrpc/connect-node";
import { ImageService } from "./gen/bottega/v1/image_pb.js";

const [address = "127.0.0.1:8470", prompt = "a big red star", file = "star.png"] = process.argv.slice(2);
const key = process.env["BOTTEGA_API_KEY"];
const withKey: Interceptor = (next) => (request) => {
  if (key) request.header.set("authorization", `Bearer ${key}`);
  return next(request);
};
const transport = createGrpcTransport({ baseUrl: `http://${address}`, interceptors: [withKey] });
const client = createClient(ImageService, transport);

for await (const { event } of client.generate({ spec: { prompt, seed: 7n } })) {
  if (event?.event.case === "progress") {
    console.log(`step ${event.event.value.stepsDone} of ${event.event.value.stepsTotal}`);
  } else if (event?.event.case === "completed") {
    const chunks: Uint8Array[] = [];
    for await (const part of client.getImage({ jobId: event.jobId, index: 0 })) chunks.push(part.chunk);
    writeFileSync(file, Buffer.concat(chunks));
    console.log(`${file}, seed ${event.event.value.images[0]?.seed}`);
  }
}
