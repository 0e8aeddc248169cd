//! Move GPU memory between hosts over plain TCP.
