// A browser without a locale says that its language is one that it does not know itself, `en-US@posix`, and the plot
// library then fails while it is loaded. Loaded before it, this gives it a language.

try {
  new Intl.NumberFormat(navigator.language);
} catch {
  Object.defineProperty(navigator, "language", { value: "en", configurable: true });
}
