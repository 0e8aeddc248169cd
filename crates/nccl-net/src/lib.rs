//! The ncclNet plugin ABI: tables, device-unpack layouts, loading and exporting.
