//! Row stores: fixed-width rows by number, two planes a row
