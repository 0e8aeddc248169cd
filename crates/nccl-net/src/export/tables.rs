//! The tables of an exported plugin, one a version, and the macro that gives them their symbols.

use super::traits::Exported;
use super::{entries, register, transfer};
use crate::tables::{NetV5, NetV6, NetV7, NetV8, NetV9, NetV10, NetV11, NetV12};

/// The v5 table of a plugin, for a `static`.
pub const fn table_v5<P: Exported>() -> NetV5 {
    NetV5 {
        name: P::NAME.as_ptr(),
        init: Some(entries::init_v5::<P>),
        devices: Some(entries::devices::<P>),
        get_properties: Some(entries::get_properties_v6::<P>),
        listen: Some(entries::listen_v5::<P>),
        connect: Some(entries::connect_v5::<P>),
        accept: Some(entries::accept_v5::<P>),
        reg_mr: Some(register::reg_mr_v5::<P>),
        dereg_mr: Some(register::dereg_mr::<P>),
        isend: Some(transfer::isend_v5::<P>),
        irecv: Some(transfer::irecv_v5::<P>),
        iflush: Some(transfer::iflush::<P>),
        test: Some(transfer::test::<P>),
        close_send: Some(entries::close_send::<P>),
        close_recv: Some(entries::close_recv::<P>),
        close_listen: Some(entries::close_listen::<P>),
    }
}

/// The v6 table of a plugin, for a `static`.
pub const fn table_v6<P: Exported>() -> NetV6 {
    NetV6 {
        name: P::NAME.as_ptr(),
        init: Some(entries::init_v5::<P>),
        devices: Some(entries::devices::<P>),
        get_properties: Some(entries::get_properties_v6::<P>),
        listen: Some(entries::listen_v5::<P>),
        connect: Some(entries::connect_v5::<P>),
        accept: Some(entries::accept_v5::<P>),
        reg_mr: Some(register::reg_mr_v5::<P>),
        reg_mr_dma_buf: Some(register::reg_mr_dma_buf::<P>),
        dereg_mr: Some(register::dereg_mr::<P>),
        isend: Some(transfer::isend_v5::<P>),
        irecv: Some(transfer::irecv_v5::<P>),
        iflush: Some(transfer::iflush::<P>),
        test: Some(transfer::test::<P>),
        close_send: Some(entries::close_send::<P>),
        close_recv: Some(entries::close_recv::<P>),
        close_listen: Some(entries::close_listen::<P>),
    }
}

/// The v7 table of a plugin, for a `static`.
pub const fn table_v7<P: Exported>() -> NetV7 {
    NetV7 {
        name: P::NAME.as_ptr(),
        init: Some(entries::init_v5::<P>),
        devices: Some(entries::devices::<P>),
        get_properties: Some(entries::get_properties_v7::<P>),
        listen: Some(entries::listen_v5::<P>),
        connect: Some(entries::connect_v7::<P>),
        accept: Some(entries::accept_v7::<P>),
        reg_mr: Some(register::reg_mr_v5::<P>),
        reg_mr_dma_buf: Some(register::reg_mr_dma_buf::<P>),
        dereg_mr: Some(register::dereg_mr::<P>),
        isend: Some(transfer::isend_v5::<P>),
        irecv: Some(transfer::irecv_v5::<P>),
        iflush: Some(transfer::iflush::<P>),
        test: Some(transfer::test::<P>),
        close_send: Some(entries::close_send::<P>),
        close_recv: Some(entries::close_recv::<P>),
        close_listen: Some(entries::close_listen::<P>),
        get_device_mr: if P::DEVICE_QUEUE {
            Some(register::get_device_mr::<P>)
        } else {
            None
        },
        irecv_consumed: if P::DEVICE_QUEUE {
            Some(transfer::irecv_consumed::<P>)
        } else {
            None
        },
    }
}

/// The v8 table of a plugin, for a `static`.
pub const fn table_v8<P: Exported>() -> NetV8 {
    NetV8 {
        name: P::NAME.as_ptr(),
        init: Some(entries::init_v5::<P>),
        devices: Some(entries::devices::<P>),
        get_properties: Some(entries::get_properties_v8::<P>),
        listen: Some(entries::listen_v5::<P>),
        connect: Some(entries::connect_v7::<P>),
        accept: Some(entries::accept_v7::<P>),
        reg_mr: Some(register::reg_mr_v8::<P>),
        reg_mr_dma_buf: Some(register::reg_mr_dma_buf::<P>),
        dereg_mr: Some(register::dereg_mr::<P>),
        isend: Some(transfer::isend_v5::<P>),
        irecv: Some(transfer::irecv_v5::<P>),
        iflush: Some(transfer::iflush::<P>),
        test: Some(transfer::test::<P>),
        close_send: Some(entries::close_send::<P>),
        close_recv: Some(entries::close_recv::<P>),
        close_listen: Some(entries::close_listen::<P>),
        get_device_mr: if P::DEVICE_QUEUE {
            Some(register::get_device_mr::<P>)
        } else {
            None
        },
        irecv_consumed: if P::DEVICE_QUEUE {
            Some(transfer::irecv_consumed::<P>)
        } else {
            None
        },
    }
}

/// The v9 table of a plugin, for a `static`.
pub const fn table_v9<P: Exported>() -> NetV9 {
    NetV9 {
        name: P::NAME.as_ptr(),
        init: Some(entries::init_v5::<P>),
        devices: Some(entries::devices::<P>),
        get_properties: Some(entries::get_properties_v9::<P>),
        listen: Some(entries::listen_v5::<P>),
        connect: Some(entries::connect_v7::<P>),
        accept: Some(entries::accept_v7::<P>),
        reg_mr: Some(register::reg_mr_v8::<P>),
        reg_mr_dma_buf: Some(register::reg_mr_dma_buf::<P>),
        dereg_mr: Some(register::dereg_mr::<P>),
        isend: Some(transfer::isend_v9::<P>),
        irecv: Some(transfer::irecv_v9::<P>),
        iflush: Some(transfer::iflush::<P>),
        test: Some(transfer::test::<P>),
        close_send: Some(entries::close_send::<P>),
        close_recv: Some(entries::close_recv::<P>),
        close_listen: Some(entries::close_listen::<P>),
        get_device_mr: if P::DEVICE_QUEUE {
            Some(register::get_device_mr::<P>)
        } else {
            None
        },
        irecv_consumed: if P::DEVICE_QUEUE {
            Some(transfer::irecv_consumed::<P>)
        } else {
            None
        },
        make_v_device: None,
    }
}

/// The v10 table of a plugin, for a `static`.
pub const fn table_v10<P: Exported>() -> NetV10 {
    NetV10 {
        name: P::NAME.as_ptr(),
        init: Some(entries::init_v10::<P>),
        devices: Some(entries::devices::<P>),
        get_properties: Some(entries::get_properties_v9::<P>),
        listen: Some(entries::listen_v5::<P>),
        connect: Some(entries::connect_v10::<P>),
        accept: Some(entries::accept_v7::<P>),
        reg_mr: Some(register::reg_mr_v8::<P>),
        reg_mr_dma_buf: Some(register::reg_mr_dma_buf::<P>),
        dereg_mr: Some(register::dereg_mr::<P>),
        isend: Some(transfer::isend_v10::<P>),
        irecv: Some(transfer::irecv_v10::<P>),
        iflush: Some(transfer::iflush::<P>),
        test: Some(transfer::test::<P>),
        close_send: Some(entries::close_send::<P>),
        close_recv: Some(entries::close_recv::<P>),
        close_listen: Some(entries::close_listen::<P>),
        get_device_mr: if P::DEVICE_QUEUE {
            Some(register::get_device_mr::<P>)
        } else {
            None
        },
        irecv_consumed: if P::DEVICE_QUEUE {
            Some(transfer::irecv_consumed::<P>)
        } else {
            None
        },
        make_v_device: None,
    }
}

/// The v11 table of a plugin, for a `static`.
pub const fn table_v11<P: Exported>() -> NetV11 {
    NetV11 {
        name: P::NAME.as_ptr(),
        init: Some(entries::init_v11::<P>),
        devices: Some(entries::devices::<P>),
        get_properties: Some(entries::get_properties_v11::<P>),
        listen: Some(entries::listen_v11::<P>),
        connect: Some(entries::connect_v11::<P>),
        accept: Some(entries::accept_v7::<P>),
        reg_mr: Some(register::reg_mr_v8::<P>),
        reg_mr_dma_buf: Some(register::reg_mr_dma_buf::<P>),
        dereg_mr: Some(register::dereg_mr::<P>),
        isend: Some(transfer::isend_v10::<P>),
        irecv: Some(transfer::irecv_v10::<P>),
        iflush: Some(transfer::iflush::<P>),
        test: Some(transfer::test::<P>),
        close_send: Some(entries::close_send::<P>),
        close_recv: Some(entries::close_recv::<P>),
        close_listen: Some(entries::close_listen::<P>),
        get_device_mr: if P::DEVICE_QUEUE {
            Some(register::get_device_mr::<P>)
        } else {
            None
        },
        irecv_consumed: if P::DEVICE_QUEUE {
            Some(transfer::irecv_consumed::<P>)
        } else {
            None
        },
        make_v_device: None,
        finalize: Some(entries::finalize),
        set_net_attr: Some(entries::set_net_attr),
    }
}

/// The v12 table of a plugin, for a `static`.
pub const fn table_v12<P: Exported>() -> NetV12 {
    NetV12 {
        name: P::NAME.as_ptr(),
        init: Some(entries::init_v11::<P>),
        devices: Some(entries::devices::<P>),
        get_properties: Some(entries::get_properties_v12::<P>),
        listen: Some(entries::listen_v11::<P>),
        connect: Some(entries::connect_v11::<P>),
        accept: Some(entries::accept_v7::<P>),
        reg_mr: Some(register::reg_mr_v8::<P>),
        reg_mr_dma_buf: Some(register::reg_mr_dma_buf::<P>),
        dereg_mr: Some(register::dereg_mr::<P>),
        isend: Some(transfer::isend_v10::<P>),
        irecv: Some(transfer::irecv_v10::<P>),
        iflush: Some(transfer::iflush::<P>),
        test: Some(transfer::test::<P>),
        close_send: Some(entries::close_send::<P>),
        close_recv: Some(entries::close_recv::<P>),
        close_listen: Some(entries::close_listen::<P>),
        get_device_mr: if P::DEVICE_QUEUE {
            Some(register::get_device_mr::<P>)
        } else {
            None
        },
        irecv_consumed: if P::DEVICE_QUEUE {
            Some(transfer::irecv_consumed::<P>)
        } else {
            None
        },
        make_v_device: None,
        finalize: Some(entries::finalize),
        set_net_attr: Some(entries::set_net_attr),
    }
}

/// Exports a type that implements [`NetPlugin`](crate::export::NetPlugin) from a `cdylib`, under
/// the symbols `ncclNetPlugin_v5` to `ncclNetPlugin_v12` that are named.
///
/// A plugin with a device queue is only understood by hosts that find v7 or later.
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

/// Exports the v7 table alone.
#[macro_export]
macro_rules! export_v7 {
    ($plugin:ty) => {
        $crate::export_plugin!($plugin: v7);
    };
}

/// One exported symbol; used by [`export_plugin!`](crate::export_plugin).
#[doc(hidden)]
#[macro_export]
macro_rules! export_symbol {
    (v5, $plugin:ty) => {
        /// The ncclNet v5 table.
        #[unsafe(no_mangle)]
        #[expect(non_upper_case_globals, reason = "the name is the ABI's")]
        pub static ncclNetPlugin_v5: $crate::tables::NetV5 = $crate::export::table_v5::<$plugin>();
    };
    (v6, $plugin:ty) => {
        /// The ncclNet v6 table.
        #[unsafe(no_mangle)]
        #[expect(non_upper_case_globals, reason = "the name is the ABI's")]
        pub static ncclNetPlugin_v6: $crate::tables::NetV6 = $crate::export::table_v6::<$plugin>();
    };
    (v7, $plugin:ty) => {
        /// The ncclNet v7 table.
        #[unsafe(no_mangle)]
        #[expect(non_upper_case_globals, reason = "the name is the ABI's")]
        pub static ncclNetPlugin_v7: $crate::tables::NetV7 = $crate::export::table_v7::<$plugin>();
    };
    (v8, $plugin:ty) => {
        /// The ncclNet v8 table.
        #[unsafe(no_mangle)]
        #[expect(non_upper_case_globals, reason = "the name is the ABI's")]
        pub static ncclNetPlugin_v8: $crate::tables::NetV8 = $crate::export::table_v8::<$plugin>();
    };
    (v9, $plugin:ty) => {
        /// The ncclNet v9 table.
        #[unsafe(no_mangle)]
        #[expect(non_upper_case_globals, reason = "the name is the ABI's")]
        pub static ncclNetPlugin_v9: $crate::tables::NetV9 = $crate::export::table_v9::<$plugin>();
    };
    (v10, $plugin:ty) => {
        /// The ncclNet v10 table.
        #[unsafe(no_mangle)]
        #[expect(non_upper_case_globals, reason = "the name is the ABI's")]
        pub static ncclNetPlugin_v10: $crate::tables::NetV10 =
            $crate::export::table_v10::<$plugin>();
    };
    (v11, $plugin:ty) => {
        /// The ncclNet v11 table.
        #[unsafe(no_mangle)]
        #[expect(non_upper_case_globals, reason = "the name is the ABI's")]
        pub static ncclNetPlugin_v11: $crate::tables::NetV11 =
            $crate::export::table_v11::<$plugin>();
    };
    (v12, $plugin:ty) => {
        /// The ncclNet v12 table.
        #[unsafe(no_mangle)]
        #[expect(non_upper_case_globals, reason = "the name is the ABI's")]
        pub static ncclNetPlugin_v12: $crate::tables::NetV12 =
            $crate::export::table_v12::<$plugin>();
    };
}
