// A short word on what was just done; screen readers say it.

const SECONDS = 6;
let timer = null;

export function say(text) {
  const toast = document.getElementById("toast");
  toast.textContent = text;
  clearTimeout(timer);
  timer = setTimeout(() => (toast.textContent = ""), SECONDS * 1000);
}
