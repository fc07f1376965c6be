"""Who drafts and how much: statistics, costs and the controller that decides by them."""
