// Shows the OpenAPI document. All text is set as text, never as markup.

const KEY = "culet.key"; // where the chat page keeps the API key
const SCHEMAS = "#/components/schemas/";
const byId = (id) => document.getElementById(id);

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

const nameOf = (schema) => schema.$ref.slice(SCHEMAS.length);
const linkTo = (name) => element("a", { href: `#${name}` }, name);

// Returns the type of a value as text and links.
function typeOf(schema) {
  if (schema.$ref) return [linkTo(nameOf(schema))];
  const options = schema.anyOf ?? schema.oneOf;
  if (options) {
    const shown = options.filter((option) => option.type !== "null").map(typeOf);
    return shown.flatMap((parts, index) => (index ? [" or ", ...parts] : parts));
  }
  if (schema.const !== undefined) return [JSON.stringify(schema.const)];
  if (schema.enum) {
    const values = schema.enum.filter((value) => value !== null);
    return [values.length ? values.map((value) => JSON.stringify(value)).join(" or ") : "not supported"];
  }
  if (schema.type === "array") return schema.items ? ["list of ", ...typeOf(schema.items)] : ["list"];
  if (schema.type === "object" && schema.additionalProperties?.type) return ["object of ", ...typeOf(schema.additionalProperties)];
  return [[schema.type ?? "any"].flat().filter((type) => type !== "null").join(" or ")];
}

function boundsOf(schema) {
  const own = [schema, ...(schema.anyOf ?? [])];
  const parts = [];
  for (const { minimum, exclusiveMinimum, maximum } of own) {
    if (exclusiveMinimum !== undefined) parts.push(`above ${exclusiveMinimum}`);
    if (minimum !== undefined) parts.push(`from ${minimum}`);
    if (maximum !== undefined) parts.push(`to ${maximum}`);
  }
  return parts.join(" ");
}

function fieldsOf(schema) {
  const required = new Set(schema.required ?? []);
  const rows = Object.entries(schema.properties ?? {}).map(([name, field]) => {
    const given = field.default === undefined || field.default === null ? "" : `default ${JSON.stringify(field.default)}`;
    const notes = [required.has(name) ? "required" : "", given, boundsOf(field)].filter(Boolean).join(", ");
    return element("tr", {}, element("td", {}, element("code", {}, name)), element("td", {}, ...typeOf(field)), element("td", { class: "faint" }, notes));
  });
  const about = schema.description ? [element("p", {}, schema.description)] : [];
  if (!rows.length) return [...about, element("p", { class: "faint" }, ...typeOf(schema))];
  const head = element("tr", {}, ...["field", "type", ""].map((title) => element("th", {}, title)));
  return [...about, element("table", {}, head, ...rows)];
}

function operation(path, method, entry, schemas) {
  const about = (entry.description ?? "").split("\n")[0];
  const title = element("summary", {}, element("span", { class: "method" }, method.toUpperCase()), element("code", {}, path), " ", element("span", { class: "about" }, about));
  const parts = [];
  const body = entry.requestBody?.content?.["application/json"]?.schema;
  if (body?.$ref) parts.push(element("p", {}, "Body: ", linkTo(nameOf(body))), ...fieldsOf(schemas[nameOf(body)]).slice(-1));
  const answer = entry.responses?.["200"]?.content?.["application/json"]?.schema;
  if (answer?.$ref) parts.push(element("p", {}, "Answer: ", linkTo(nameOf(answer))));
  return element("details", {}, title, ...parts);
}

function show(document_) {
  const schemas = document_.components?.schemas ?? {};
  const paths = Object.entries(document_.paths).flatMap(([path, methods]) => Object.entries(methods).map(([method, entry]) => operation(path, method, entry, schemas)));
  byId("paths").replaceChildren(...paths);
  const named = Object.entries(schemas).flatMap(([name, schema]) => [element("h2", { id: name }, name), ...fieldsOf(schema)]);
  byId("schemas").replaceChildren(...named);
  const target = location.hash && byId(location.hash.slice(1));
  if (target) target.scrollIntoView();
}

async function load() {
  const key = sessionStorage.getItem(KEY);
  const response = await fetch("openapi.json", { headers: key ? { Authorization: `Bearer ${key}` } : {} });
  const body = await response.json().catch(() => ({}));
  byId("key-form").hidden = response.status !== 401;
  byId("problem").hidden = response.ok;
  if (response.ok) show(body);
  else byId("problem").textContent = body.error?.message ?? `The server answered ${response.status}.`;
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, byId("key").value.trim());
  load();
});
load();
