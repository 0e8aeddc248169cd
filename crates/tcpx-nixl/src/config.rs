//! Settings: from NIXL's parameters, else from the environment. vLLM passes none, so every setting
//! has a variable.

use std::path::Path;
use std::time::Duration;

use tcpx::{Auth, Key, KeyFileError, Local, Options, TcpNetwork};
use tcpx_net::TcpOptions;
use tcpx_net::interfaces::InterfaceFilter;

/// Parameters of the backend, and the variables that stand for them.
const SETTINGS: [(&str, &[&str]); 7] = [
    ("key", &["TCPX_KEY"]),
    ("key_file", &["TCPX_KEY_FILE"]),
    ("port", &["TCPX_NIXL_PORT"]),
    ("interfaces", &["TCPX_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"]),
    ("lanes", &["UCCL_TCPX_NUM_CHANNELS"]),
    ("encrypt", &["TCPX_ENCRYPT"]),
    ("local", &["TCPX_LOCAL"]),
];

/// Longest time that a transfer may stall while its peer lives.
const STALL: Duration = Duration::from_secs(300);

/// Why the settings cannot work.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ConfigError {
    #[error("{from} holds no key: {why}")]
    Key { from: String, why: String },
    #[error(transparent)]
    KeyFile(#[from] KeyFileError),
    #[error("{from}: expected {expected}, {arrived:?} was given")]
    Setting {
        from: &'static str,
        expected: &'static str,
        arrived: String,
    },
    #[error("the system gave no random bytes: {0}")]
    Random(String),
}

/// Settings of an agent.
#[derive(Debug, Clone)]
pub(crate) struct Config {
    /// The key that every agent of the job was given; without one each agent makes its own, which
    /// travels with its metadata.
    pub(crate) shared_key: Option<Key>,
    /// The key of this agent's listener.
    pub(crate) listener_key: Key,
    pub(crate) port: u16,
    pub(crate) interfaces: Option<String>,
    pub(crate) lanes: u16,
    /// Payload is encrypted; every agent must say so.
    pub(crate) encrypt: bool,
    /// Whether agents of this host read each other's memory.
    pub(crate) local: Local,
}

impl Config {
    /// Reads the settings; `variable` reads the environment.
    pub(crate) fn read(
        parameters: &[(String, String)],
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<Self, ConfigError> {
        let given = |setting: &str| {
            let is_it = |name: &str| name == setting;
            let parameter = parameters.iter().find(|(name, _)| is_it(name));
            let variables = SETTINGS.iter().find(|(name, _)| is_it(name));
            let variables = variables.map_or(&[][..], |(_, variables)| *variables);
            let parameter = parameter.map(|(_, value)| value.clone());
            let mut given = parameter
                .into_iter()
                .chain(variables.iter().filter_map(|name| variable(name)));
            given.find(|text| !text.trim().is_empty())
        };
        for (name, _) in parameters {
            if !SETTINGS.iter().any(|(known, _)| known == name) {
                tracing::warn!(
                    "parameter {name:?} of the backend TCPX is not known and has no effect"
                );
            }
        }
        let shared_key = match (given("key"), given("key_file")) {
            (Some(text), _) => Some(parse_key("the parameter key or TCPX_KEY", &text)?),
            (None, Some(path)) => Some(key_of_file(&path)?),
            (None, None) => None,
        };
        let listener_key = match &shared_key {
            Some(key) => key.clone(),
            None => fresh_key()?,
        };
        let number = |setting, from, expected| match given(setting) {
            None => Ok(0),
            Some(text) => text
                .trim()
                .parse::<u16>()
                .map_err(|_| ConfigError::Setting {
                    from,
                    expected,
                    arrived: text,
                }),
        };
        let interfaces = given("interfaces");
        if let Some(text) = &interfaces
            && InterfaceFilter::parse(text).is_none()
        {
            return Err(ConfigError::Setting {
                from: "the parameter interfaces or TCPX_SOCKET_IFNAME",
                expected: "names of interfaces",
                arrived: text.clone(),
            });
        }
        let encrypt = match given("encrypt")
            .map(|text| text.trim().to_lowercase())
            .as_deref()
        {
            None | Some("0" | "n" | "no" | "f" | "false" | "off") => false,
            Some("1" | "y" | "yes" | "t" | "true" | "on") => true,
            // Whoever asks for it must not get less in silence.
            Some(other) => {
                return Err(ConfigError::Setting {
                    from: "the parameter encrypt or TCPX_ENCRYPT",
                    expected: "1 or 0",
                    arrived: other.to_owned(),
                });
            }
        };
        Ok(Self {
            shared_key,
            listener_key,
            port: number(
                "port",
                "the parameter port or TCPX_NIXL_PORT",
                "a port, 0 for any free one",
            )?,
            interfaces,
            lanes: number(
                "lanes",
                "the parameter lanes or UCCL_TCPX_NUM_CHANNELS",
                "a number of lanes, 0 for automatic",
            )?,
            encrypt,
            local: match given("local") {
                None => Local::Auto,
                Some(text) => text.trim().parse().map_err(|_| ConfigError::Setting {
                    from: "the parameter local or TCPX_LOCAL",
                    expected: "auto, on or off",
                    arrived: text,
                })?,
            },
        })
    }

    /// Names of the parameters, and what they are by default.
    pub(crate) fn defaults() -> Vec<(String, String)> {
        let defaults = [
            "port=0",
            "interfaces=",
            "lanes=0",
            "key_file=",
            "encrypt=0",
            "local=auto",
        ];
        let pairs = defaults.iter().filter_map(|text| text.split_once('='));
        pairs
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .collect()
    }

    /// Settings of an endpoint or a connection.
    pub(crate) fn options(&self, auth: Auth, gpu: Option<tcpx::Gpu>) -> Options {
        let network = TcpNetwork::new(TcpOptions {
            lanes: self.lanes,
            interfaces: self.interfaces.clone(),
            local: self.local,
            ..TcpOptions::default()
        });
        let mut options = Options::new(std::sync::Arc::new(network), auth);
        options.gpu = gpu;
        options.encrypt = self.encrypt;
        // A dead peer is noticed by the connection; a transfer may wait long behind others of its
        // own.
        options.deadlines.stall = STALL;
        options
    }
}

fn fresh_key() -> Result<Key, ConfigError> {
    tcpx::generate_key().map_err(|error| ConfigError::Random(error.to_string()))
}

fn parse_key(from: &str, text: &str) -> Result<Key, ConfigError> {
    Key::parse(text).map_err(|error| ConfigError::Key {
        from: from.to_owned(),
        why: error.to_string(),
    })
}

fn key_of_file(path: &str) -> Result<Key, ConfigError> {
    match Auth::of_file(Path::new(path))? {
        Auth::Key(key) => Ok(key),
        _ => Err(ConfigError::Key {
            from: path.to_owned(),
            why: "every agent needs the whole key, as `tcpx key FILE` makes it".to_owned(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(
        parameters: &[(&str, &str)],
        variables: &[(&str, &str)],
    ) -> Result<Config, ConfigError> {
        let parameters: Vec<_> = parameters
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
            .collect();
        Config::read(&parameters, |name| {
            let found = variables.iter().find(|(known, _)| *known == name)?;
            Some(found.1.to_owned())
        })
    }

    #[test]
    fn without_a_key_every_agent_has_one_of_its_own() {
        let (one, other) = (read(&[], &[]).unwrap(), read(&[], &[]).unwrap());
        assert!(one.shared_key.is_none());
        assert_ne!(one.listener_key, other.listener_key);
    }

    #[test]
    fn parameters_win_over_variables() {
        let config = read(
            &[("port", "7"), ("interfaces", "=lo")],
            &[("TCPX_NIXL_PORT", "8"), ("NCCL_SOCKET_IFNAME", "eth")],
        )
        .unwrap();
        assert_eq!(
            (config.port, config.interfaces.as_deref()),
            (7, Some("=lo"))
        );
        let config = read(&[("port", "")], &[("TCPX_NIXL_PORT", "8")]).unwrap();
        assert_eq!(config.port, 8);
    }

    #[test]
    fn the_path_within_a_host_is_as_the_parameter_says() {
        let local = |parameter: &[(&str, &str)]| {
            read(parameter, &[("TCPX_LOCAL", "on")]).map(|it| it.local)
        };
        assert_eq!(local(&[]).unwrap(), Local::On);
        assert_eq!(local(&[("local", "off")]).unwrap(), Local::Off);
        let refused = local(&[("local", "sometimes")]).unwrap_err().to_string();
        assert!(refused.contains("auto, on or off"), "{refused}");
    }

    #[test]
    fn who_asks_for_encryption_gets_it_or_an_error() {
        let encrypts = |text: &str| read(&[], &[("TCPX_ENCRYPT", text)]).map(|it| it.encrypt);
        assert!(encrypts("1").unwrap() && encrypts("True").unwrap());
        assert!(!encrypts("0").unwrap() && !encrypts("").unwrap());
        let refused = encrypts("aes").unwrap_err().to_string();
        assert!(refused.contains("TCPX_ENCRYPT"), "{refused}");
    }

    #[test]
    fn wrong_settings_name_themselves() {
        let text = |result: Result<Config, ConfigError>| result.unwrap_err().to_string();
        assert!(text(read(&[("port", "x")], &[])).contains("TCPX_NIXL_PORT"));
        assert!(text(read(&[], &[("TCPX_KEY", "short")])).contains("TCPX_KEY"));
        assert!(text(read(&[("key_file", "/nowhere")], &[])).contains("/nowhere"));
    }
}
