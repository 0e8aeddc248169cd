//! The tables of an exported plugin, one a version, and the macro that gives them their symbols.

use super::traits::Exported;
use super::{entries, register, transfer};
use crate::raw_properties::*;
use crate::tables::*;

/// What fills the table of each version.
macro_rules! tables {
    ($($(#[$meta:meta])* $function:ident -> $table:ident:
        $init:ident $properties:ident $listen:ident $connect:ident $accept:ident $reg_mr:ident
        $isend:ident $irecv:ident
        [$($dma_buf:ident)?] [$($absent:ident)*] [$($last:ident)*];
    )*) => {$(
        $(#[$meta])*
        pub const fn $function<P: Exported>() -> $table {
            $table {
                name: P::NAME.as_ptr(),
                init: Some(entries::$init::<P>),
                devices: Some(entries::devices::<P>),
                get_properties: Some(entries::get_properties::<P, $properties>),
                listen: Some(entries::$listen::<P>),
                connect: Some(entries::$connect::<P>),
                accept: Some(entries::$accept::<P>),
                reg_mr: Some(register::$reg_mr::<P>),
                $($dma_buf: Some(register::$dma_buf::<P>),)?
                dereg_mr: Some(register::dereg_mr::<P>),
                isend: Some(transfer::$isend::<P>),
                irecv: Some(transfer::$irecv::<P>),
                iflush: Some(transfer::iflush::<P>),
                test: Some(transfer::test::<P>),
                close_send: Some(entries::close_send::<P>),
                close_recv: Some(entries::close_recv::<P>),
                close_listen: Some(entries::close_listen::<P>),
                $($absent: None,)*
                $($last: Some(entries::$last),)*
            }
        }
    )*};
}

tables! {
    /// The v5 table of a plugin, for a `static`.
    table_v5 -> NetV5:
        init_v5 RawPropertiesV6 listen_v5 connect_v5 accept_v5 reg_mr_v5 isend_v5 irecv_v5
        [] [] [];
    /// The v6 table of a plugin, for a `static`.
    table_v6 -> NetV6:
        init_v5 RawPropertiesV6 listen_v5 connect_v5 accept_v5 reg_mr_v5 isend_v5 irecv_v5
        [reg_mr_dma_buf] [] [];
    /// The v7 table of a plugin, for a `static`.
    table_v7 -> NetV7:
        init_v5 RawPropertiesV7 listen_v5 connect_v7 accept_v7 reg_mr_v5 isend_v5 irecv_v5
        [reg_mr_dma_buf] [get_device_mr irecv_consumed] [];
    /// The v8 table of a plugin, for a `static`.
    table_v8 -> NetV8:
        init_v5 RawPropertiesV8 listen_v5 connect_v7 accept_v7 reg_mr_v8 isend_v5 irecv_v5
        [reg_mr_dma_buf] [get_device_mr irecv_consumed] [];
    /// The v9 table of a plugin, for a `static`.
    table_v9 -> NetV9:
        init_v5 RawPropertiesV9 listen_v5 connect_v7 accept_v7 reg_mr_v8 isend_v9 irecv_v9
        [reg_mr_dma_buf] [get_device_mr irecv_consumed make_v_device] [];
    /// The v10 table of a plugin, for a `static`.
    table_v10 -> NetV10:
        init_v10 RawPropertiesV9 listen_v5 connect_v10 accept_v7 reg_mr_v8 isend_v10 irecv_v10
        [reg_mr_dma_buf] [get_device_mr irecv_consumed make_v_device] [];
    /// The v11 table of a plugin, for a `static`.
    table_v11 -> NetV11:
        init_v11 RawPropertiesV11 listen_v11 connect_v11 accept_v7 reg_mr_v8 isend_v10 irecv_v10
        [reg_mr_dma_buf] [get_device_mr irecv_consumed make_v_device] [finalize set_net_attr];
    /// The v12 table of a plugin, for a `static`.
    table_v12 -> NetV12:
        init_v11 RawPropertiesV12 listen_v11 connect_v11 accept_v7 reg_mr_v8 isend_v10 irecv_v10
        [reg_mr_dma_buf] [get_device_mr irecv_consumed make_v_device] [finalize set_net_attr];
}

/// Exports a type that implements [`NetPlugin`](crate::export::NetPlugin) from a `cdylib`, under
/// the symbols `ncclNetPlugin_v5` to `ncclNetPlugin_v12` that are named.
#[macro_export]
macro_rules! export_plugin {
    ($plugin:ty: $($version:ident),+ $(,)?) => {
        impl $crate::export::Exported for $plugin {
            fn cell() -> &'static $crate::export::PluginCell<Self> {
                static CELL: $crate::export::PluginCell<$plugin> =
                    $crate::export::PluginCell::new();
                &CELL
            }
        }
        $($crate::export_symbol!($version, $plugin);)+
    };
}

/// One exported symbol; used by [`export_plugin!`](crate::export_plugin).
#[doc(hidden)]
#[macro_export]
macro_rules! export_symbol {
    (v5, $plugin:ty) => { $crate::export_symbol!(ncclNetPlugin_v5: NetV5 = table_v5, $plugin); };
    (v6, $plugin:ty) => { $crate::export_symbol!(ncclNetPlugin_v6: NetV6 = table_v6, $plugin); };
    (v7, $plugin:ty) => { $crate::export_symbol!(ncclNetPlugin_v7: NetV7 = table_v7, $plugin); };
    (v8, $plugin:ty) => { $crate::export_symbol!(ncclNetPlugin_v8: NetV8 = table_v8, $plugin); };
    (v9, $plugin:ty) => { $crate::export_symbol!(ncclNetPlugin_v9: NetV9 = table_v9, $plugin); };
    (v10, $plugin:ty) => { $crate::export_symbol!(ncclNetPlugin_v10: NetV10 = table_v10, $plugin); };
    (v11, $plugin:ty) => { $crate::export_symbol!(ncclNetPlugin_v11: NetV11 = table_v11, $plugin); };
    (v12, $plugin:ty) => { $crate::export_symbol!(ncclNetPlugin_v12: NetV12 = table_v12, $plugin); };
    ($symbol:ident: $table:ident = $function:ident, $plugin:ty) => {
        #[doc = concat!("The [`", stringify!($table), "`] of the plugin.")]
        #[unsafe(no_mangle)]
        #[expect(non_upper_case_globals, reason = "the name is the ABI's")]
        pub static $symbol: $crate::tables::$table = $crate::export::$function::<$plugin>();
    };
}
