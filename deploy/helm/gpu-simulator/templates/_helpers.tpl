{{- define "gpu-simulator.labels" -}}
{{ include "gpu-simulator.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "gpu-simulator.selector" -}}
app.kubernetes.io/name: gpu-simulator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}
