//! What a plugin exports: its entry for each form of a call, and the symbols of its tables.

use super::traits::Exported;
use super::{entries, register, transfer};
use crate::adapt;
use crate::tables::*;

/// A table that a plugin can export.
pub trait Export<P: Exported>: Sized {
    /// It, for a `static`.
    const TABLE: Self;
}

/// The form of a call for which a plugin has an entry; what the call is says `Call`.
pub(crate) trait Entry<P: Exported, Call>: Sized {
    /// It.
    const ENTRY: Self;
}

macro_rules! entries {
    ($($call:ident { $($form:ty = $module:ident::$entry:ident),* })*) => {$($(
        impl<P: Exported> Entry<P, adapt::$call> for $form {
            const ENTRY: Self = $module::$entry::<P>;
        }
    )*)*};
}

entries! {
    Init { InitV5 = entries::init_v5, InitV10 = entries::init_v10, InitV11 = entries::init_v11 }
    Listen { ListenV5 = entries::listen_v5, ListenV11 = entries::listen_v11 }
    Connect {
        ConnectV5 = entries::connect_v5,
        ConnectV7 = entries::connect_v7,
        ConnectV10 = entries::connect_v10,
        ConnectV11 = entries::connect_v11
    }
    Accept { AcceptV5 = entries::accept_v5, AcceptV7 = entries::accept_v7 }
    RegMr { RegMrV5 = register::reg_mr_v5, RegMrV8 = register::reg_mr_v8 }
    Isend { IsendV5 = transfer::isend_v5, IsendV9 = transfer::isend_v9, IsendV10 = transfer::isend_v10 }
    Irecv { IrecvV5 = transfer::irecv_v5, IrecvV9 = transfer::irecv_v9, IrecvV10 = transfer::irecv_v10 }
}

/// Exports a type that implements [`NetPlugin`](crate::export::NetPlugin) from a `cdylib`: each
/// symbol that is named is that [table](crate::tables).
#[macro_export]
macro_rules! export_plugin {
    ($plugin:ty: $($symbol:ident: $table:ident),+ $(,)?) => {
        impl $crate::export::Exported for $plugin {
            fn cell() -> &'static $crate::export::PluginCell<Self> {
                static CELL: $crate::export::PluginCell<$plugin> =
                    $crate::export::PluginCell::new();
                &CELL
            }
        }
        $(
            #[doc = concat!("The [`", stringify!($table), "`] of the plugin.")]
            #[unsafe(no_mangle)]
            #[expect(non_upper_case_globals, reason = "the name is the ABI's")]
            pub static $symbol: $crate::tables::$table =
                <$crate::tables::$table as $crate::export::Export<$plugin>>::TABLE;
        )+
    };
}
