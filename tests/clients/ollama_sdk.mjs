// The texts that ollama's client gets, by the name that it is told.
import { Ollama } from "ollama";

const ai = new Ollama({ host: process.argv[2] });
const { models } = await ai.list();
const model = models[0].name;
const messages = [{ role: "user", content: "Tell me a story" }];
const asked = { model, messages, options: { num_predict: 20, temperature: 0 }, keep_alive: "5m" };
const whole = await ai.chat(asked);
let text = "";
for await (const part of await ai.chat({ ...asked, stream: true })) text += part.message.content;
await ai.show({ model });
const { embeddings } = await ai.embed({ model, input: ["a", "b"] });
if (embeddings.length !== 2) throw new Error(`${embeddings.length} vectors`);
console.log(JSON.stringify([whole.message.content, text]));
