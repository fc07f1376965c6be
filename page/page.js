// The page: a story to scroll, and the workbench below it.

import "./workbench.js";
