// Search of a site that is opened from a folder. Browsers refuse a Worker on file://, so the search code runs in a
// hidden frame instead. The name keeps mkdocs-material from adding a script of the network for the same purpose.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const scope = frame.contentWindow;
      scope.document.open(); // else Firefox replaces the document once more after this constructor
      scope.document.write("<!doctype html><html><body></body></html>");
      scope.document.close();
      scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const load = (source) =>
        new Promise((resolve, reject) => {
          const script = scope.document.createElement("script");
          script.src = source;
          script.onload = resolve;
          script.onerror = () => reject(new Error(`cannot load ${source}`));
          scope.document.body.append(script);
        });
      scope.importScripts = (...sources) =>
        sources.reduce((before, source) => before.then(() => load(source)), Promise.resolve());
      this.scope = scope;
      this.loaded = load(new URL(url, location.href).href);
    }

    postMessage(data) {
      this.loaded.then(() => this.scope.dispatchEvent(new this.scope.MessageEvent("message", { data })));
    }

    terminate() {
      this.scope.frameElement.remove();
    }
  };
}
