//! The popularity sketch and the adaptive key.
