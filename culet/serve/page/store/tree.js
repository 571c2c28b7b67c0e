// Messages form a tree: each has a parent, and several children are branches. What the page shows is the path to one message.

const byAge = (a, b) => a.created - b.created || (a.id < b.id ? -1 : 1);

// Returns the messages from the first one to `head`.
export function pathTo(messages, head) {
  const path = [];
  const seen = new Set(); // an imported file may have a cycle
  for (let at = messages.get(head); at && !seen.has(at.id); at = messages.get(at.parent)) {
    seen.add(at.id);
    path.unshift(at);
  }
  return path;
}

// Returns the children of each message by its id, oldest first. The first messages are children of null.
export function childrenByParent(messages) {
  const children = new Map();
  for (const message of [...messages.values()].sort(byAge)) {
    if (!children.has(message.parent)) children.set(message.parent, []);
    children.get(message.parent).push(message);
  }
  return children;
}

export function siblings(children, message) {
  return children.get(message.parent).filter((other) => other.role === message.role);
}

// Returns the end of the branch below `id`, always along the newest child.
export function newestEnd(messages, id) {
  const children = childrenByParent(messages);
  const seen = new Set();
  let at = id;
  while (!seen.has(at)) {
    seen.add(at);
    at = children.get(at)?.at(-1).id ?? at;
  }
  return at;
}

export function newestOf(messages) {
  return [...messages.values()].sort(byAge).at(-1)?.id ?? null;
}
